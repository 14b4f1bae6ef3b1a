"""Controls: the comparison of completions goes red as soon as one selected row is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.harness import Completion, assert_same, engine, run
from engine.workload import BLOCKS, POOLS, REQUESTS
from torch import Tensor

from vllm_ula.attention import store
from vllm_ula.records import Call
from vllm_ula.step import Domain

pytestmark = pytest.mark.engine


def host_rows(domain: Domain, slots: Tensor) -> Tensor:
    """Host rows of those logical slots that live on the host, int64."""
    homes = domain.residency.translate(slots)
    return homes[homes >= domain.residency.num_device] - domain.residency.num_device


def swap(domain: Domain, selected: Tensor, live: Tensor) -> bool:
    """Swap a host row the call selects with another valid one."""
    mine = host_rows(domain, selected)[:1]
    other = host_rows(domain, live)
    other = other[other != mine][:1] if mine.numel() else other[:0]
    if not other.numel():
        return False
    pair = torch.cat((mine, other))
    domain.layers[0].host[pair] = domain.layers[0].host[pair.flip(0)]
    return True


def shift(domain: Domain, selected: Tensor, live: Tensor) -> bool:
    """Give a host row the call selects the bytes of the position a block later."""
    late = selected[torch.isin(selected + 16, live)]
    both_on_host = (domain.residency.home[late] >= domain.residency.num_device) & (
        domain.residency.home[late + 16] >= domain.residency.num_device
    )
    slot = late[both_on_host][:1]
    if not slot.numel():
        return False
    rows = domain.layers[0].host
    rows[host_rows(domain, slot)] = rows[host_rows(domain, slot + 16)]
    return True


@pytest.mark.parametrize("damage", [None, swap, shift])
def test_the_comparison_goes_red(
    tiny: str, expected: list[Completion], damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage one host row of one layer just before a decode call that selects it, once."""
    damaged = []

    def damaging(domain: Domain, call: Call) -> Tensor:
        if damage and not damaged and bool(call.decode.all()):
            selected = call.selection[call.selection >= 0].unique()
            if damage(domain, selected, domain.residency.live.nonzero().squeeze(1)):
                damaged.append(domain)
        return undamaged(domain, call)

    undamaged = store.run
    monkeypatch.setattr(store, "run", damaging)
    with engine(tiny, POOLS["minimum"], num_gpu_blocks_override=BLOCKS) as llm:
        found = run(llm, REQUESTS)
    if damage is None:
        assert_same(found, expected)
        return
    assert damaged
    with pytest.raises(AssertionError, match="differ"):
        assert_same(found, expected)
