"""The attention of one DSA layer, with and without UlaCache behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override
from vllm.v1.attention.backend import AttentionLayer, MLAAttentionImpl
from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroupBuilder

from vllm_ula.attention.metadata import UlaMetadata
from vllm_ula.kernels import dispatch


@dataclass(frozen=True, slots=True)
class Pending:
    """Rows `[T, width]` of a call, in the model's dtype, and their logical slots int64 `[T]`."""

    rows: Tensor
    slots: Tensor


class UlaSparseMlaImpl(MLAAttentionImpl[UlaMetadata]):
    """Top-k attention over rows addressed by logical slot.

    Without UlaCache a logical slot is a row of vLLM's cache. With it, `bind` puts a `RowStore`
    between the two: rows are written and homes resolved by one step of the layer's domain.
    """

    is_sparse: ClassVar[bool] = True
    supports_dense_mha_prefill = False
    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        topk_indices_buffer: Tensor,
        kv_lora_rank: int,
        indexer: object | None = None,
        index_group_builder: SparseMLAIndexGroupBuilder | None = None,
        **mla_args: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.latent = kv_lora_rank
        self.topk = topk_indices_buffer
        # An MTP layer is given no builder: it is a group of its own.
        builder = index_group_builder or SparseMLAIndexGroupBuilder(topk_indices_buffer)
        self.index_group, self.index_group_index = builder.register_layer(indexer is not None)
        self.store: RowStore | None = None
        self._pending: Pending | None = None

    def bind(self, store: RowStore | None) -> None:
        """Put rows behind UlaCache, or (None) give them back to vLLM's cache."""
        self.store = store

    def record_logical_topk_ready(self) -> None:
        """Called by vLLM after the indexer; program order is enough on a CPU."""

    @override
    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Write the rows of a call; with UlaCache only remember them for the step."""
        if kv_cache.numel() == 0:
            return
        slots = slot_mapping.flatten().long()
        rows = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1)[: slots.numel()]
        if self.store is not None:
            self._pending = Pending(rows, slots)
            return
        flat = kv_cache.view(-1, kv_cache.shape[-1])
        dispatch.scatter(flat, flat[:0], slots, rows)

    @override
    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: UlaMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of all tokens of a call over their selected rows.

        Args:
            q: `[T, heads, latent + rope]`, or its two parts.
            kv_c_and_k_pe_cache: vLLM's cache of the layer, `[blocks, block_size, width]`.
            attn_metadata: of the call.
            layer: unused.

        Returns:
            `[T, heads, latent]` and the log-sum-exp `[T, heads]`.
        """
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if self.store is None:
            cache = kv_c_and_k_pe_cache
            device, homes = cache.view(-1, cache.shape[-1]), attn_metadata.selection(self.topk)
            host = device[:0]
        else:
            pending, self._pending = self._pending, None
            device, host = self.store.rows.device, self.store.rows.host
            homes = self.store.step(attn_metadata, pending, self.topk)
        # Prefill reads rows in place: host rows cross the bus once, not once per group of heads.
        staged = attn_metadata.has_prefill and host.shape[0] > 0
        out, lse = dispatch.sparse_mla(
            queries, device, host, homes, self.scale, self.latent, staged=staged
        )
        return out.to(queries.dtype), lse


if TYPE_CHECKING:
    from vllm_ula.attention.store import RowStore
