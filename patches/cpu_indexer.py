"""The sparse indexer on a CPU: where its keys live and how its queries are quantised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_ula.compat import VERSIONS
from vllm_ula.patches.record import Patch


def _our_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_attn_backend(self: Any) -> Any:
        from vllm_ula.attention.backend import UlaIndexerBackend

        return UlaIndexerBackend

    return get_attn_backend


def _backend_needed() -> bool:
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    return not DeepseekV32IndexerBackend.supports_block_size(16)


def _in_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_ula.kernels.reference.fp8 import quantize

    @functools.wraps(original)
    def per_token_group_quant_fp8(
        x: torch.Tensor, group_size: int, column_major_scales: bool = False, use_ue8m0: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the indexer asks of it: one group a row, scales that are powers of two."""
        assert group_size == x.shape[-1]
        assert use_ue8m0
        assert not column_major_scales
        return quantize(x)

    return per_token_group_quant_fp8


def _quantisation_needed() -> bool:
    """Whether vLLM's kernel does not run here, or rounds to fp8 wrongly."""
    from vllm.model_executor.models.deepseek_v2 import per_token_group_quant_fp8

    from vllm_ula.kernels.reference.fp8 import quantize

    x = torch.linspace(-1, 1, 128).unsqueeze(0)
    try:
        values, scales = per_token_group_quant_fp8(x, 128, use_ue8m0=True)
    except Exception:  # whatever calling a Triton kernel without Triton raises
        return True
    right, right_scales = quantize(x)
    return not torch.equal(values.float() * scales, right.float() * right_scales)


PATCHES = (
    Patch(
        target="vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache",
        attribute="get_attn_backend",
        defined_in="vllm.model_executor.models.deepseek_v2",
        parameters=("self",),
        replace=_our_backend,
        versions=VERSIONS,
        why="index keys name a GPU backend with blocks of 64; the cache asks no platform",
        remove_when="DeepseekV32IndexerCache asks the platform for its backend",
        needed=_backend_needed,
    ),
    Patch(
        target="vllm.model_executor.models.deepseek_v2",
        attribute="per_token_group_quant_fp8",
        defined_in="vllm.model_executor.layers.quantization.utils.fp8_utils",
        parameters=(
            "x",
            "group_size",
            "eps",
            "dtype",
            "column_major_scales",
            "tma_aligned_scales",
            "out_q",
            "use_ue8m0",
        ),
        replace=_in_torch,
        versions=VERSIONS,
        why="the indexer quantises its queries with a Triton kernel, which no CPU has; Triton's "
        "interpreter has it, but loses the carry when it rounds to fp8",
        remove_when="per_token_group_quant_fp8 has a torch path",
        needed=_quantisation_needed,
    ),
)
