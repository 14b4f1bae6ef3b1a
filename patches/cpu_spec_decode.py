"""Speculative decoding with a temperature on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_ula.compat import VERSIONS
from vllm_ula.patches.record import Patch


def _in_torch(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def expand_batch_to_tokens(
        x: Tensor,
        cu_num_tokens: Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> Tensor:
        replaced = x.masked_fill(x == replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    return expand_batch_to_tokens


def _needed() -> bool:
    """Whether vLLM's CPU kernel still fills a copy of a result that is not int64."""
    from vllm.utils import cpu_triton_utils

    output = torch.zeros(3)
    expand: Callable[..., None] = cpu_triton_utils._expand_kernel_impl
    expand(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 0, 0)
    return bool(output.tolist() != [0.5, 2.0, 2.0])


PATCHES = (
    Patch(
        target="vllm.v1.sample.rejection_sampler",
        attribute="expand_batch_to_tokens",
        defined_in="vllm.v1.sample.rejection_sampler",
        parameters=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        replace=_in_torch,
        versions=VERSIONS,
        why="the CPU kernel writes temperatures, as integers, into a copy: requests that sample "
        "with drafts get tokens from uninitialised memory. No sampler can be chosen by a plugin",
        remove_when="_expand_kernel_impl of vllm/utils/cpu_triton_utils.py honours floats",
        needed=_needed,
    ),
)
