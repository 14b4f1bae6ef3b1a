"""vLLM attention backends of DSA models in torch: rows and index keys by logical slot."""

from __future__ import annotations

from typing import ClassVar

import torch
from typing_extensions import override
from vllm.config.cache import CacheDType
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_ula.attention.impl import UlaSparseMlaImpl
from vllm_ula.attention.metadata import UlaMetadata, UlaMetadataBuilder
from vllm_ula.models import ROW_TYPES


class _UlaBackend(AttentionBackend):
    """What both caches of a DSA layer have in common."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(ROW_TYPES)

    @staticmethod
    @override
    def get_builder_cls() -> type[UlaMetadataBuilder]:
        return UlaMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[UlaMetadata]:
        return UlaMetadata

    @staticmethod
    @override
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    @override
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Layer outermost: the blocks of a layer lie behind each other, rows have one stride.
        return (KVCacheLayout.LBHNC,)


class UlaSparseMlaBackend(_UlaBackend):
    """Rows: multi-head latent attention over the selected ones."""

    @staticmethod
    @override
    def get_name() -> str:
        return "ULA_MLA_SPARSE"

    @staticmethod
    @override
    def get_impl_cls() -> type[UlaSparseMlaImpl]:
        return UlaSparseMlaImpl

    @classmethod
    @override
    def is_mla(cls) -> bool:
        return True

    @classmethod
    @override
    def is_sparse(cls) -> bool:
        return True


class UlaIndexerBackend(_UlaBackend):
    """Index keys: storage and metadata of the indexer; attention does not use it."""

    @staticmethod
    @override
    def get_name() -> str:
        return "ULA_INDEXER"

    @staticmethod
    @override
    def get_impl_cls() -> type[UlaSparseMlaImpl]:
        raise NotImplementedError("the indexer has no attention")

    @classmethod
    @override
    def supports_dcp(cls) -> bool:
        return False

    @classmethod
    @override
    def supports_pcp(cls) -> bool:
        return False
