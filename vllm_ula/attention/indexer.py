"""The sparse indexer: store index keys, score the history, select."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_ula.attention.metadata import UlaMetadata
from vllm_ula.kernels import dispatch

# Of scores: what vLLM's own indexer allows itself. Tokens are cut into calls only beyond it,
# because rounding may depend on which tokens of a request are scored together.
WORKSPACE_BYTES = 512 << 20


def select(
    queries: Tensor, keys: Tensor, weights: Tensor, selection: Tensor, cache_name: str
) -> None:
    """Store the call's index keys, then select positions for each of its tokens.

    Args:
        queries: float8_e4m3fn `[T, heads, head_dim]`.
        keys: `[T, head_dim]`.
        weights: `[T, heads]`, the queries' scales folded in.
        selection: int32 `[max tokens, topk]`, rows 0 to T - 1 are overwritten.
        cache_name: vLLM's name of the index key cache.
    """
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):  # a profiling run has no requests
        selection[: queries.shape[0]] = -1
        return
    metadata = context.attn_metadata[cache_name]
    assert isinstance(metadata, UlaMetadata)
    cache = context.no_compile_layers[cache_name].kv_cache
    rows = cache.view(-1, cache.shape[-1])
    tokens, width, k = metadata.num_actual_tokens, metadata.max_length, selection.shape[1]
    dispatch.store_index_keys(rows, metadata.slot_mapping, keys[:tokens])
    selection[tokens : queries.shape[0]] = -1

    positions = metadata.position_of_token
    if width <= k:  # every position is selected, whatever its score
        every = torch.arange(k, dtype=torch.int32, device=selection.device)
        selection[:tokens] = every.where(every <= positions.unsqueeze(1), -1)
        return
    chunk = max(WORKSPACE_BYTES // (width * 4), 1)
    for first in range(0, tokens, chunk):
        part = slice(first, min(first + chunk, tokens))
        scores = dispatch.index_scores(
            queries[part],
            weights[part],
            rows,
            metadata.block_table,
            metadata.request_of_token[part],
            positions[part],
            metadata.block_size,
            width,
        )
        selection[part] = dispatch.topk(scores, positions[part], k)


def _select_fake(
    queries: Tensor, keys: Tensor, weights: Tensor, selection: Tensor, cache_name: str
) -> None:
    """`torch.compile` sees `select` as one opaque operation that writes `selection`."""


direct_register_custom_op(
    op_name="ula_select",
    op_func=select,
    mutates_args=["selection"],
    fake_impl=_select_fake,
)


@CustomOp.register_oot(name="SparseAttnIndexer")
class UlaSparseAttnIndexer(SparseAttnIndexer):
    """vLLM's indexer layer with `select` behind it on a CPU."""

    @override
    def forward_cpu(
        self,
        hidden_states: Tensor,
        q_quant: Tensor | tuple[Tensor, Tensor],
        k: Tensor | None,
        weights: Tensor,
    ) -> Tensor:
        selection: Tensor = self.topk_indices_buffer
        if self.skip_k_cache_insert:  # DeepSeek-V4 stores compressed keys itself
            selection = super().forward_cpu(hidden_states, q_quant, k, weights)
        else:
            torch.ops.vllm.ula_select(q_quant, k, weights, selection, self.k_cache.prefix)
        return selection
