"""SGLang's HiSparse: a fixed number of hot rows per request, all history also on the host.

Public sources: the HiSparse paper (arXiv 2608.07009), SGLang's guide and coordinator
(https://github.com/sgl-project/sglang, `managers/hisparse_coordinator.py`) with the tests of its
swap-in kernel, and the figures in sgl-project/sglang#33075.

| rule here | source |
|---|---|
| every request and layer group has B rows and one page for the newest tokens | coordinator |
| a request of at most B tokens has all its rows on the device | guide: short sequences |
| a longer one starts with an empty region | coordinator: direct admission to the host |
| hits stay in order and are the newest; misses replace the oldest not selected | kernel tests |
| the row written in a step is on the device in that step | coordinator: newest slot |
| each row is copied to the host once, the step after it was written | guide: eager backup |
| several decode tokens of a request are served as one set | inferred from the multi-step kernel |
| a row of the newest page counts as gone in the next step | inferred |

Evicting copies nothing, and rows of one request never use the room of another.
"""

from __future__ import annotations

from typing_extensions import override

from vllm_ula.replay.hot_rows import Eviction, HotRows
from vllm_ula.replay.policy import Distinct, Policy, Served, sequences
from vllm_ula.traces.events import Admission, Deaths, End, TracedCall


class SglangHiSparse(Policy):
    """B rows per request, exact LRU.

    Args:
        hot_rows: B, > 0.
        eviction: who leaves a region; the paper compares others with LRU.
    """

    def __init__(self, hot_rows: int, eviction: Eviction = Eviction.LRU) -> None:
        self.hot_rows = hot_rows
        self.eviction = eviction
        self.regions: dict[int, HotRows] = {}
        self._distinct = Distinct()

    @override
    def call(self, call: TracedCall) -> Served:
        total = Served()
        for seq, tokens in sequences(call):
            decode = call.decode[tokens]
            if not decode.any():
                continue
            wanted = self._distinct(call.selected_positions[tokens][decode])
            positions = call.positions[tokens][decode]
            missed = 0
            # A short request has a device row for every token.
            if int(positions.max()) >= self.hot_rows:
                region = self.regions.get(seq) or self._region(seq, 0)
                missed = region.serve(wanted[wanted < positions.min()])
            total += Served(
                selected=len(wanted),
                hits=len(wanted) - missed,
                fetched=missed,
                written_back=int((call.written[tokens][decode] >= 0).sum()),
            )
        return total

    @override
    def admit(self, admission: Admission) -> None:
        self._region(admission.seq, admission.prompt_tokens)

    @override
    def end(self, end: End) -> None:
        self.regions.pop(end.seq, None)

    @override
    def deaths(self, deaths: Deaths) -> None:
        """Rows go with their request."""

    def _region(self, seq: int, prompt_tokens: int) -> HotRows:
        region = HotRows(self.hot_rows, self.eviction, seed=seq)
        if 0 < prompt_tokens <= self.hot_rows:
            region.fill(self.hot_rows)
        self.regions[seq] = region
        return region
