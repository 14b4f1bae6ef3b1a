"""Claim: of the entries that select a row, one speaks for it."""

from __future__ import annotations

import torch

from vllm_ula.kernels.reference.translate import translate
from vllm_ula.kernels.tables import CLOCK, PLACED, CallTables, MapTables


def claim(tables: MapTables, call: CallTables) -> None:
    """Claim every selected row for its first entry, those of decode tokens ahead of others.

    With E entries, entry e claims its row with the number E - e, or 2 E - e if a decode token
    selects it; the highest claim of a row stays in `marks`. Whatever order entries come in, it is
    the same one.

    Args:
        tables: `marks` changes.
        call: `wanted` and `missing` are set: of the rows that a decode token's entries have
            claimed, those that have no device row for this call yet, and those on the host.
    """
    selection = call.selection.reshape(-1)
    claims = _claims(call)
    there = selection >= 0
    tables.marks.scatter_reduce_(0, selection[there], claims[there], "amax")
    won = winners(tables, call) & call.decode.repeat_interleave(call.selection.shape[1])

    homes = translate(tables.home, selection)
    on_host = homes >= tables.num_device
    stamp = tables.stamp[homes.clamp(0, tables.num_device - 1)]
    placed = tables.roles[selection.clamp_min(0)] & PLACED != 0
    seated = torch.where(on_host, placed, stamp >> 1 == tables.state[CLOCK])
    call.wanted.copy_((won & ~seated).view(call.selection.shape).sum(1))
    call.missing.copy_((won & on_host).view(call.selection.shape).sum(1))


def winners(tables: MapTables, call: CallTables) -> torch.Tensor:
    """Entries whose claim stands: bool `[T * k]`."""
    selection = call.selection.reshape(-1)
    marks = tables.marks[selection.clamp_min(0)]
    return (selection >= 0) & (marks == _claims(call))


def _claims(call: CallTables) -> torch.Tensor:
    num = call.selection.numel()
    claims = num - torch.arange(num, dtype=torch.int32, device=call.selection.device)
    return claims + num * call.decode.repeat_interleave(call.selection.shape[1]).int()
