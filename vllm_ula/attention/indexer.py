"""The sparse indexer in torch: store index keys, score the history, select."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_ula.attention.metadata import UlaMetadata
from vllm_ula.kernels.reference import index_keys
from vllm_ula.kernels.reference.index_scores import index_scores
from vllm_ula.kernels.reference.topk import topk

WORKSPACE_BYTES = 16 << 20  # of scores by head; see attention/impl.py


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
    selection[: queries.shape[0]] = -1
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        return  # a profiling run has no requests
    metadata = context.attn_metadata[cache_name]
    assert isinstance(metadata, UlaMetadata)
    block_size = metadata.block_size
    cache = context.no_compile_layers[cache_name].kv_cache
    rows = cache.view(-1, cache.shape[-1])
    index_keys.store(rows, metadata.slot_mapping, keys[: metadata.num_actual_tokens])

    k = selection.shape[1]
    for request, (start, stop) in enumerate(metadata.query_ranges):
        positions = metadata.position_of_token[start:stop].unsqueeze(1)
        length = metadata.lengths[request]
        if length <= k:  # every position is selected, whatever its score
            all_positions = torch.arange(length, dtype=torch.int32)
            selection[start:stop, :length] = all_positions.where(all_positions <= positions, -1)
            continue
        blocks = metadata.block_table[request, : -(-length // block_size)].long()
        slots = (blocks.unsqueeze(1) * block_size + torch.arange(block_size)).view(-1)[:length]
        history, scales = index_keys.load(rows, slots)
        chunk = max(WORKSPACE_BYTES // (queries.shape[1] * length * 4), 1)
        for first in range(start, stop, chunk):
            part = slice(first, min(first + chunk, stop))
            scores = index_scores(
                queries[part].float(),
                weights[part].float(),
                history,
                scales,
                metadata.position_of_token[part],
            )
            selection[part] = topk(scores, k)


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
