"""The comparison of recorded sequences with the scheduler's tables sees what it must see.

That nothing is found where nothing is wrong, every story of the other files holds.
"""

from __future__ import annotations

from typing import Any

import pytest
from scheduler.test_random_stories import STORIES, tell

from vllm_ula.connectors import sequences
from vllm_ula.connectors.records import GivenBlocks
from vllm_ula.connectors.sequences import SequenceLog


def all_written(seq: int, first: int, blocks: tuple[int, ...], first_written: int) -> GivenBlocks:
    """Prefix hits taken for blocks the sequence writes."""
    return GivenBlocks(seq, first, blocks, first)


def resumed_as_running(log: SequenceLog, request: str, groups: Any, num_computed: int) -> Any:
    """Blocks a sequence resumes with, put behind those it lost."""
    return log._more(request, groups)


def tell_all(lag: int) -> None:
    for seed in range(STORIES):
        tell(lag, seed)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("damage", ["all_written", "resumed_as_running"])
def test_control_damage_is_seen(lag: int, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if damage == "all_written":
        monkeypatch.setattr(sequences, "GivenBlocks", all_written)
    else:
        monkeypatch.setattr(SequenceLog, "_all", resumed_as_running)
    with pytest.raises(AssertionError) as seen:
        tell_all(lag)
    assert seen.traceback[-1].path.name == "sequences.py"
