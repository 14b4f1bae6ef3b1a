"""Synthetic selections with stated statistics, for lengths no small model reaches.

    position   0 .. sinks   ...........   favourites anywhere   ...........   recent window, newest
    chance        1                    1, then rank ** -tail          heavy tail, then flat

A token's selection is drawn anew in every step from chances that change slowly: the first tokens
always, the newest with a chance that is flat in a window and falls off behind it as a power of the
age, and favourites, positions anywhere in the history ranked per request, of which a share is
replaced by others in every step. What is missing to top-k is drawn from the favourites.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ula.planner.jit import compiled
from vllm_ula.traces.events import Int64s

_WORD = 2.0**32


@dataclass(frozen=True)
class Statistics:
    """What selections look like.

    `recent_tail` and `drift` are fitted so that LRU with 2,048 and 8,192 rows per request misses
    29.94 and 6.67 % (published: 30 and 6.7); `vllm_ula/replay/fit.py` has the whole table.

    Attributes:
        topk: positions a token selects.
        sinks: first tokens, selected in every step.
        recent_window: newest tokens with the same chance.
        recent_share: share of the selection that lies in that window, as far as there are tokens.
        recent_tail: exponent with which the chance falls off with the age behind the window.
        recent_reach: age in tokens behind which a token is selected as a favourite only.
        favourites: ranked positions of a request.
        favourite_tail: exponent with which the chance falls off with the rank.
        drift: share of the favourites replaced in a step.
        spread: standard deviation of the logarithm by which drift and recent share differ from
            request to request.
    """

    topk: int = 2048
    sinks: int = 16
    recent_window: int = 512
    recent_share: float = 0.24
    recent_tail: float = 1.82
    recent_reach: int = 16384
    favourites: int = 16384
    favourite_tail: float = 3.0
    drift: float = 0.0076
    spread: float = 0.2


class Selector:
    """The selections of one request.

    Args:
        statistics: what they look like.
        length: tokens of the prompt; favourites lie there at first.
        seed: decides everything.
    """

    def __init__(self, statistics: Statistics, length: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.statistics = statistics
        mine = np.exp(statistics.spread * rng.standard_normal(2))
        recent = recent_chances(statistics, statistics.recent_share * mine[0])
        num = statistics.topk - statistics.sinks - float(recent.sum())
        self._recent = _words(recent)
        self._favourite = _words(favourite_chances(statistics, num))
        self._drift = np.uint64(min(statistics.drift * mine[1], 1.0) * (_WORD - 1))
        self.favourites = rng.integers(statistics.sinks, length, statistics.favourites)
        self._state = rng.integers(1, 2**63, 1, dtype=np.uint64)
        self._marks = np.zeros(1024, dtype=np.bool_)

    def select(self, length: int) -> Int64s:
        """Distinct positions `[topk]` below `length`, -1 padded if there are fewer.

        Args:
            length: positions there are, the selecting token's own included.
        """
        if length > len(self._marks):
            self._marks = np.zeros(max(length, 2 * len(self._marks)), dtype=np.bool_)
        if length <= self.statistics.topk:
            everything = np.full(self.statistics.topk, -1, dtype=np.int64)
            everything[:length] = np.arange(length)
            return everything
        selected: Int64s = _select(
            length,
            self.statistics.topk,
            self.statistics.sinks,
            self._recent,
            self.favourites,
            self._favourite,
            self._drift,
            self._state,
            self._marks,
        )
        return selected


def recent_chances(statistics: Statistics, share: float) -> NDArray[np.float64]:
    """Chance of a token by its age, float64 `[recent_reach]`."""
    age = np.arange(1, statistics.recent_reach + 1)
    flat = min(share * statistics.topk / statistics.recent_window, 1.0)
    behind = (statistics.recent_window / age) ** statistics.recent_tail
    chances: NDArray[np.float64] = flat * np.minimum(behind, 1.0)
    return chances


def favourite_chances(statistics: Statistics, num: float) -> NDArray[np.float64]:
    """Chance of a favourite by its rank, float64 `[favourites]`, so that `num` are expected."""
    falling = np.arange(1, statistics.favourites + 1) ** -statistics.favourite_tail
    low, high = 0.0, float(statistics.favourites) ** statistics.favourite_tail
    for _ in range(200):
        scale = (low + high) / 2
        if np.minimum(scale * falling, 1.0).sum() < num:
            low = scale
        else:
            high = scale
    chances: NDArray[np.float64] = np.minimum(high * falling, 1.0)
    return chances


def _words(chances: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Chances as the 32-bit words a random word must stay below."""
    return (chances * (_WORD - 1)).astype(np.uint64)


@compiled
def _random(state):  # type: ignore[no-untyped-def]
    # xorshift64; numpy's generators cost more than the selection itself.
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return x


@compiled
def _select(length, topk, sinks, recent, favourites, chance, drift, state, marks):  # type: ignore[no-untyped-def]
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    out = np.empty(topk, dtype=np.int64)
    num = sinks
    for p in range(sinks):
        out[p] = p
        marks[p] = True

    for age in range(min(len(recent), length - sinks)):
        if num < topk and (_random(state) >> high) < recent[age]:
            out[num] = length - 1 - age
            marks[out[num]] = True
            num += 1

    span = np.uint64(length - sinks)
    for rank in range(len(favourites)):
        word = _random(state)
        if (word & low) < drift:
            favourites[rank] = sinks + np.int64(((word >> high) * span) >> high)
            word = _random(state)
        p = favourites[rank]
        if num < topk and (word >> high) < chance[rank] and not marks[p]:
            out[num] = p
            marks[p] = True
            num += 1

    # A few are missing where chance had it so; any position will do once favourites run out.
    tries = 0
    while num < topk:
        word = _random(state)
        if tries < 4 * topk:
            p = favourites[np.int64(((word >> high) * np.uint64(len(favourites))) >> high)]
        else:
            p = sinks + np.int64(((word >> high) * span) >> high)
        tries += 1
        if not marks[p]:
            out[num] = p
            marks[p] = True
            num += 1
    for i in range(topk):
        marks[out[i]] = False
    return out
