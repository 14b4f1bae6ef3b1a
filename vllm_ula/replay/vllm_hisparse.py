"""vLLM's HiSparse: resident pages while device blocks last, then a hot region per request.

Public source: vLLM 0.32, `v1/hisparse/{coordinator,runtime,layout}.py` and `BlockPool.unpin_blocks`
(https://github.com/vllm-project/vllm/pull/53781). A page is one block of rows.

    queue of free blocks    first to be taken .. freed, unpinned .. last

| rule here | source |
|---|---|
| a page gets a device block when it is first written; its rows are mirrored on the host | layout |
| a hot region is asked for when fewer blocks are free than max(a region, a tenth) | watermark |
| it is there in the next step, if the blocks are | hot manager |
| if not, the request's own pages give way; vLLM preempts and resumes it | simplification |
| with a region, all full pages but the last two are unpinned, from the tail on | unpin |
| unpinned pages are read until the pool hands them out, in the order of its queue | BlockPool |
| rows of pages that are gone go through the hot region, LRU as in SGLang | resolver |
| a written row is copied to the host once | row mirrors |
| a page for which no block is left is on the host only; vLLM would wait | simplification |
| blocks of a finished request are free at once; prefixes are not shared | simplification |

Index keys take blocks of the same pool in vLLM. Here the pool is what they leave.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from vllm_ula.replay.hot_rows import HotRows
from vllm_ula.replay.policy import Distinct, Policy, Served, sequences
from vllm_ula.traces.events import Admission, Deaths, End, Int64s, TracedCall

TAIL_PAGES = 2


@dataclass(slots=True)
class _Request:
    """Where the pages of a request are."""

    resident: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(16, dtype=np.bool_))
    num_pages: int = 0
    unpinned: int = 0  # pages below have been unpinned, or never had a block
    pinned_blocks: int = 0
    asks: bool = False
    hot: HotRows | None = None


class VllmHisparse(Policy):
    """Resident pages, then B hot rows per request.

    Args:
        device_rows: rows of the pool that pages and hot regions share.
        hot_rows: B, > 0.
        page_size: tokens of a page.
    """

    def __init__(self, device_rows: int, hot_rows: int, page_size: int) -> None:
        self.hot_rows = hot_rows
        self.page_size = page_size
        self.hot_blocks = -(-hot_rows // page_size)
        num_blocks = device_rows // page_size
        self.watermark = max(self.hot_blocks, num_blocks // 10)
        self.requests: dict[int, _Request] = {}
        # A free block, by the unpinned page that may still be read from it.
        self.free: deque[tuple[_Request, int] | None] = deque([None] * num_blocks)
        self._distinct = Distinct()

    @override
    def call(self, call: TracedCall) -> Served:
        total = Served()
        for seq, tokens in sequences(call):
            request = self.requests.setdefault(seq, _Request())
            positions = call.positions[tokens]
            self._advance(request, int(positions.max()) + 1)
            decode = call.decode[tokens]
            if decode.any():
                wanted = self._distinct(call.selected_positions[tokens][decode])
                fetched = self._fetch(request, wanted, int(positions[decode].min()))
                total += Served(
                    selected=len(wanted),
                    hits=len(wanted) - fetched,
                    fetched=fetched,
                    written_back=int((call.written[tokens][decode] >= 0).sum()),
                )
        return total

    @override
    def admit(self, admission: Admission) -> None:
        self.end(End(admission.seq))
        request = self.requests[admission.seq] = _Request()
        # Page by page, as chunks of a long prompt are: early pages may go before the last come.
        for length in range(self.page_size, admission.prompt_tokens, self.page_size):
            self._advance(request, length)
        self._advance(request, admission.prompt_tokens)

    @override
    def end(self, end: End) -> None:
        request = self.requests.pop(end.seq, None)
        if request is None:
            return
        request.resident[:] = False
        hot_blocks = self.hot_blocks if request.hot is not None else 0
        self.free.extend([None] * (request.pinned_blocks + hot_blocks))

    @override
    def deaths(self, deaths: Deaths) -> None:
        """Pages go with their request."""

    def _fetch(self, request: _Request, wanted: Int64s, written_from: int) -> int:
        """Rows of distinct positions that come from the host."""
        away = wanted[~request.resident[wanted // self.page_size] & (wanted < written_from)]
        return request.hot.serve(away) if request.hot is not None else len(away)

    def _advance(self, request: _Request, length: int) -> None:
        """One step of a request: the hot region it waits for, new pages, what may be unpinned."""
        if request.asks and request.hot is None:
            if len(self.free) < self.hot_blocks:
                self._unpin(request, length)
            if len(self.free) >= self.hot_blocks:
                for _ in range(self.hot_blocks):
                    self._take()
                request.hot = HotRows(self.hot_rows)
        num_pages = -(-length // self.page_size)
        if num_pages > len(request.resident):
            grown = np.zeros(2 * num_pages, dtype=np.bool_)
            grown[: request.num_pages] = request.resident[: request.num_pages]
            request.resident = grown
        while request.num_pages < num_pages:
            if self.free:
                self._take()
                request.resident[request.num_pages] = True
                request.pinned_blocks += 1
            request.num_pages += 1
        if request.hot is None:
            request.asks = request.asks or len(self.free) < self.watermark
            return
        self._unpin(request, length)

    def _unpin(self, request: _Request, length: int) -> None:
        """Queue the blocks of full pages but the last; their rows are on the host too."""
        full = min(length // self.page_size, request.num_pages - TAIL_PAGES)
        for page in range(full - 1, request.unpinned - 1, -1):
            if request.resident[page]:
                self.free.append((request, page))
                request.pinned_blocks -= 1
        request.unpinned = max(request.unpinned, full)

    def _take(self) -> None:
        """Take the first free block; whoever still read a page from it reads it no more."""
        lost = self.free.popleft()
        if lost is not None:
            request, page = lost
            request.resident[page] = False
