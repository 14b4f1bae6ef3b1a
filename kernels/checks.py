"""What launchers check before a grid starts: a kernel reads whatever its pointers say."""

from __future__ import annotations

import torch
from torch import Tensor


def check(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> None:
    """Refuse a tensor that a kernel would misread.

    Args:
        name: of the argument.
        tensor: must be contiguous.
        dtype: what it must hold, or one of several.
        ndim: how many dimensions it must have, if that matters.
        shape: what it must be, if that is known.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or not contiguous.
    """
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in allowed:
        expected = " or ".join(str(d) for d in allowed)
        raise TypeError(f"{name} is {tensor.dtype}, expected {expected}")
    if ndim is not None and tensor.ndim != ndim:
        raise ValueError(f"{name} has {tensor.ndim} dimensions, expected {ndim}")
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {tensor.stride()}")
