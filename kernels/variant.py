"""A kernel as a GPU compiles it: compiled ahead of time, counted and tested for spills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel with the types and constants of a real use.

    Attributes:
        name: what the resource table calls it: the kernel, and what distinguishes the variant.
        kernel: the `triton.jit` function.
        signature: type of each argument that is no constant: `*i64`, `fp32`, ...; `:16` after it
            where the launcher guarantees that the pointer or number is divisible by 16.
        constants: value of each `tl.constexpr` argument.
        num_warps: as the launcher asks for.
        num_stages: as the launcher asks for.
        hot: runs on every decode step, so it must not spill registers.
        wide_loads: moves rows, so its assembly must hold 16-byte loads.
        backends: of Triton, whose launches look like this; variants for others bear the same name.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    hot: bool = False
    wide_loads: bool = False
    backends: tuple[str, ...] = ("cuda", "hip")
