"""What a map operation must leave behind, however its programs were ordered; on any device."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from vllm_ula.kernels import dispatch, tables
from vllm_ula.kernels.reference.victims import levels
from vllm_ula.kernels.tables import CallTables, MapTables

POISON = -77

Arguments = tuple[object, ...]


def copy_map(mine: MapTables) -> MapTables:
    return MapTables(*(getattr(mine, field.name).clone() for field in fields(mine)))


def copy_call(call: CallTables) -> CallTables:
    return CallTables(*(getattr(call, field.name).clone() for field in fields(call)))


def poisoned(call: CallTables) -> CallTables:
    """A copy whose outputs hold what no operation may leave there."""
    outputs = ("written_homes", "selected_homes", "wanted", "missing", "incoming", "victims")
    copied = copy_call(call)
    spoilt = {name: torch.full_like(getattr(copied, name), POISON) for name in outputs}
    return replace(copied, **spoilt, vacated=torch.full_like(copied.vacated, POISON))


def differences(name: str, mine: MapTables, call: CallTables, *args: object) -> list[str]:
    """Run an operation twice from one state, in Triton and by its reference: what differs."""
    found, found_call = copy_map(mine), copy_call(call)
    expected, expected_call = copy_map(mine), copy_call(call)
    dispatch.launcher(name)(found, found_call, *args)
    dispatch.references[name](expected, expected_call, *args)
    return _map_differences(name, found, expected) + _call_differences(
        name, mine, found, found_call, expected, expected_call
    )


def _map_differences(name: str, found: MapTables, expected: MapTables) -> list[str]:
    spent = {"levels"} if name in ("victims", "remap") else set()
    differ = []
    for field in fields(MapTables):
        a, b = getattr(found, field.name).clone(), getattr(expected, field.name).clone()
        if field.name == "state":  # cursors of the kernel, which the reference does not need
            a[[tables.BELOW, tables.AT]] = b[[tables.BELOW, tables.AT]] = 0
        if field.name not in spent and not torch.equal(a, b):
            differ.append(field.name)
    return differ


def _call_differences(
    name: str,
    before: MapTables,
    found: MapTables,
    found_call: CallTables,
    expected: MapTables,
    expected_call: CallTables,
) -> list[str]:
    lists = {"incoming", "fetch", "victims", "vacated", "write_back"}
    differ = [
        field.name
        for field in fields(CallTables)
        if field.name not in lists
        and not torch.equal(getattr(found_call, field.name), getattr(expected_call, field.name))
    ]
    if name == "touch":
        num = int(expected.state[tables.NUM_INCOMING])
        required = int(expected.state[tables.NUM_REQUIRED])
        for part in (slice(0, required), slice(required, num)):
            pairs = [_sorted(c.incoming[part], c.fetch[part]) for c in (found_call, expected_call)]
            if not torch.equal(*pairs):
                differ.append("incoming")
    if name == "victims" and not _same_victims(before, found, found_call, expected_call):
        differ.append("victims")
    return differ


def _sorted(slots: Tensor, flags: Tensor) -> Tensor:
    return torch.sort(slots * 2 + flags).values


def _same_victims(
    before: MapTables, found: MapTables, found_call: CallTables, expected_call: CallTables
) -> bool:
    """As many rows of each level, each once, none of them current; and what follows from them."""
    num = int(found.num_exchanged)
    taken, incoming = found_call.victims[:num], found_call.incoming[:num]
    level = levels(before)
    expected = expected_call.victims[:num]
    return (
        bool((taken.sort().values.diff() > 0).all())
        and not bool((before.stamp[taken] >> 1 == before.state[tables.CLOCK]).any())
        and torch.equal(level[taken].sort().values, level[expected].sort().values)
        and torch.equal(found_call.vacated[:num], before.home[incoming] - before.num_device)
        and torch.equal(found_call.write_back[:num], before.live[before.owner[taken]])
    )
