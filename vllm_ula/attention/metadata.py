"""What a forward call looks like to rows and index keys: one metadata for both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_ula.kernels import dispatch
from vllm_ula.streams import upload


@dataclass
class UlaMetadata(AttentionMetadata):
    """One forward call, per request and per token.

    vLLM's shared MLA layer routes by `num_decode_tokens`: every token counts as decode there, so
    that all of them take the one top-k path. Our own split of decode and prefill is `decode`.

    Attributes:
        num_actual_tokens: tokens T, padding included.
        slot_mapping: int64 `[T]` logical slots being written, < 0 for padding.
        block_table: int32 `[requests, blocks]` logical block ids.
        request_of_token: int64 `[T]`, -1 for padding tokens, which select nothing.
        position_of_token: int64 `[T]` in the token's own request; -1 for padding.
        decode: bool `[T]`, true for tokens of requests with at most 1 + drafts query tokens.
        has_prefill: whether any token is not `decode`, known without asking the device.
        max_length: tokens of the longest request up to and including this call, or more.
        block_size: tokens per block.
    """

    num_actual_tokens: int
    slot_mapping: Tensor
    block_table: Tensor
    request_of_token: Tensor
    position_of_token: Tensor
    decode: Tensor
    has_prefill: bool
    max_length: int
    block_size: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0

    def selection(self, topk: Tensor) -> Tensor:
        """Logical slots int64 `[T, k]` of the positions int32 `[max tokens, k]` a call selected."""
        return dispatch.logical_slots(
            topk[: self.num_actual_tokens],
            self.request_of_token,
            self.block_table,
            self.block_size,
        )


class UlaMetadataBuilder(AttentionMetadataBuilder[UlaMetadata]):
    """Builds UlaMetadata from vLLM's common metadata."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self.max_decode_query_len = max_decode_query_len(vllm_config)

    @override
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> UlaMetadata:
        """See UlaMetadata; `common_prefix_len` and `fast_build` make no difference."""
        common = common_attn_metadata
        num_tokens, num_requests = common.num_actual_tokens, common.num_reqs
        starts = common.query_start_loc_cpu[: num_requests + 1].long()
        query_lens = starts.diff()
        request = torch.repeat_interleave(torch.arange(num_requests), query_lens)
        from_end = torch.arange(len(request)) - starts[1:][request]
        decode = (query_lens <= self.max_decode_query_len)[request]
        # Padding tokens are nobody's, and no part of a prefill.
        host = torch.full((3, num_tokens), -1)
        host[:, : len(request)] = torch.stack((request, from_end, decode.long()))
        request, from_end, decode = upload(host, self.device)
        # Lengths are asked of the device alone: with asynchronous drafts the host does not know.
        lengths = common.seq_lens[:num_requests].long()
        position = (lengths[request.clamp_min(0)] + from_end).masked_fill_(request < 0, -1)
        return UlaMetadata(
            num_actual_tokens=num_tokens,
            slot_mapping=common.slot_mapping[:num_tokens].long(),
            block_table=common.block_table_tensor,
            request_of_token=request,
            position_of_token=position,
            decode=decode != 0,
            has_prefill=bool((query_lens > self.max_decode_query_len).any()),
            max_length=common.max_seq_len,
            block_size=self.block_size,
            num_decodes=num_requests,
            num_decode_tokens=num_tokens,
        )
