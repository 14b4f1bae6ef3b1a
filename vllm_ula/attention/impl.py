"""The attention of one DSA layer in torch, with and without UlaCache behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override
from vllm.v1.attention.backend import AttentionLayer, MLAAttentionImpl
from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroupBuilder

from vllm_ula.attention.metadata import UlaMetadata
from vllm_ula.kernels.reference import fp8_rows
from vllm_ula.kernels.reference.gather import gather
from vllm_ula.kernels.reference.scatter import scatter
from vllm_ula.kernels.reference.sparse_mla import sparse_mla
from vllm_ula.models import FP8_ROWS

# 1,024 tokens of top-k 128 on one core: 0.11 to 0.14 s with 2 to 32 MiB, 0.33 s with 64 MiB.
WORKSPACE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Pending:
    """Rows `[T, width]` of a call, as kept, and the logical slots int64 `[T]` they belong to."""

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
        fp8 = self.kv_cache_dtype == FP8_ROWS
        rows = fp8_rows.pack(rows) if fp8 else rows.to(kv_cache.dtype)
        if self.store is not None:
            self._pending = Pending(rows, slots)
            return
        kept = slots >= 0
        flat = kv_cache.view(-1, kv_cache.shape[-1])
        scatter(flat, flat[:0], slots[kept], rows[kept])

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
        out, lse = self._attend(queries, device, host, homes)
        return out.to(queries.dtype), lse

    def _attend(
        self, queries: Tensor, device: Tensor, host: Tensor, homes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention by home, in chunks of tokens whose rows fit the workspace.

        The chunks do not depend on where rows live, nor does the operation on a chunk: moving a
        row can change no rounding.
        """
        tokens, topk = homes.shape
        chunk = max(WORKSPACE_BYTES // (topk * self.head_size * 4), 1)
        out = torch.empty(tokens, self.num_heads, self.latent, dtype=torch.float32)
        lse = torch.empty(tokens, self.num_heads, dtype=torch.float32)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            kept = gather(device, host, homes[part])
            rows = fp8_rows.unpack(kept) if self.kv_cache_dtype == FP8_ROWS else kept.float()
            out[part], lse[part] = sparse_mla(
                queries[part].float(), rows, homes[part] >= 0, self.scale, self.latent
            )
        return out, lse


if TYPE_CHECKING:
    from vllm_ula.attention.store import RowStore
