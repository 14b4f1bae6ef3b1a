"""Rotary embedding on a CPU: MLA's 3-D queries and strided keys rotated right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_ula.compat import VERSIONS
from vllm_ula.patches.record import Patch


def _native_for_mla(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return original(self, positions, query, key)

    return forward_cpu


def _needed() -> bool:
    """Whether vLLM's CPU kernel still rotates a 3-D query with a strided key wrongly."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(64, 64, 128, 10000.0, False, torch.float32)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 64, generator=generator)
    key = torch.randn(3, 1, 128, generator=generator)[..., 64:]
    positions = torch.tensor([0, 5, 9])
    right, _ = rope.forward_native(positions, query.clone(), key.clone())
    found, _ = rope.forward_cpu(positions, query.clone(), key)
    return not torch.allclose(right, found, atol=1e-5)


PATCHES = (
    Patch(
        target="vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
        attribute="forward_cpu",
        defined_in="vllm.model_executor.layers.rotary_embedding.base",
        parameters=("self", "positions", "query", "key"),
        replace=_native_for_mla,
        versions=VERSIONS,
        why="the CPU kernel misreads a query [tokens, heads, dim] and a strided key, which is what "
        "every MLA model passes: wrong tokens, no error. A layer class cannot be exchanged for "
        "the platform's by any hook without touching every rotary embedding",
        remove_when="ops.rotary_embedding on a CPU honours strides of 3-D queries",
        needed=_needed,
    ),
)
