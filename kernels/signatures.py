"""Types of arguments that several kernels share, as a GPU compiles them: see `Variant`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of map operations, whose tables are described in `tables.py`. What varies by call has no divisor.
MAP = {
    "p_home": "*i32:16",
    "p_owner": "*i32:16",
    "p_live": "*i1:16",
    "p_stamp": "*i32:16",
    "p_edges": "*i32:16",
    "p_levels": "*i32:16",
    "p_state": "*i32:16",
    "p_totals": "*i64:16",
    "p_marks": "*i32:16",
    "p_roles": "*u8:16",
    "p_written": "*i64:16",
    "p_by_decode": "*i1:16",
    "p_selection": "*i64:16",
    "p_decode": "*i1:16",
    "p_written_homes": "*i64:16",
    "p_selected_homes": "*i64:16",
    "p_wanted": "*i32:16",
    "p_missing": "*i32:16",
    "p_incoming": "*i64:16",
    "p_fetch": "*i1:16",
    "p_victims": "*i64:16",
    "p_vacated": "*i64:16",
    "p_write_back": "*i1:16",
    "p_blocks": "*i64:16",
    "num_device": "i32:16",
    "width": "i32:16",
    "block_size": "i32:16",
    "num_entries": "i32",
    "num_written": "i32",
    "num_tokens": "i32",
    "num_slots": "i32",
    "most": "i32",
    "rows_per_period": "i32",
}

# Of rows copied as they are, in words, and of fp8 rows against bf16 ones.
_ROWS = {"p_homes": "*i64:16", "num_device": "i32", "num_rows": "i32"}
AS_WORDS = {"p_device": "*i32:16", "p_host": "*i32:16", **_ROWS, "p_rows": "*i32:16"}
AS_BYTES = {"p_device": "*u8:16", "p_host": "*u8:16", **_ROWS, "p_rows": "*bf16:16"}


def signature(kernel: Any, types: Mapping[str, str]) -> dict[str, str]:
    """Types of a kernel's arguments by their names; constants have none."""
    return {name: types[name] for name in kernel.arg_names if name in types}
