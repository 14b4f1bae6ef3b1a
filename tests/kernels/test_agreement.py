"""Controls: the comparison of map operations goes red when two valid entries are swapped."""

import pytest
from kernels.histories import AGE, ORDER, before

from kernels import agreement
from vllm_ula.kernels import dispatch, tables

# What of an operation's outcome is swapped: both entries are valid, each belongs to the other.
SPOILT = {
    "seat": lambda mine, call: call.written_homes,
    "claim": lambda mine, call: call.wanted,
    "touch": lambda mine, call: mine.stamp,
    "victims": lambda mine, call: call.vacated[: int(mine.state[tables.NUM_EXCHANGED])],
    "remap": lambda mine, call: mine.home,
}


def swap_two(values):
    """Swap two entries that differ; False if there are none."""
    others = (values != values[:1]).nonzero()
    if not len(others):
        return False
    other = int(others[0])
    values[[0, other]] = values[[other, 0]]
    return True


@pytest.mark.parametrize("name", ORDER)
def test_control_two_swapped_entries_are_found(name, monkeypatch):
    swapped = []

    def spoilt(mine, call, *args):
        dispatch.references[name](mine, call, *args)
        swapped.append(swap_two(SPOILT[name](mine, call)))

    arguments = [AGE] if name == "seat" else []
    found = 0
    for mine, call in before(name, "several programs", num_calls=6):
        monkeypatch.setattr(dispatch, "launcher", lambda name: dispatch.references[name])
        assert agreement.differences(name, mine, call, *arguments) == []
        monkeypatch.setattr(dispatch, "launcher", lambda name: spoilt)
        differ = agreement.differences(name, mine, call, *arguments)
        assert bool(differ) == swapped[-1]
        found += swapped[-1]
    assert found > 0


def test_outputs_are_poisoned_first():
    _, call = next(before("seat", "odd", num_calls=1))
    for name in ("written_homes", "selected_homes", "wanted", "missing", "incoming", "victims"):
        assert (getattr(call, name) == agreement.POISON).all()
