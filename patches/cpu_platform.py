"""DSA models on a CPU: an attention backend, and the user's choices given back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ula.compat import VERSIONS, check_parallel, is_dsa, uses_ula
from vllm_ula.models import row_type
from vllm_ula.patches.record import Patch

BACKEND = "vllm_ula.attention.backend.UlaSparseMlaBackend"


def _sparse_backend(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        from vllm.config import get_current_vllm_config

        sparse = attn_selector_config.use_sparse and attn_selector_config.use_mla
        if not (sparse and is_dsa(get_current_vllm_config())):
            return original(cls, selected_backend, attn_selector_config, num_heads)
        return BACKEND

    return get_attn_backend_cls


def _backend_needed() -> bool:
    from types import SimpleNamespace

    from vllm.platforms.cpu import CpuPlatform

    selector: Any = SimpleNamespace(use_sparse=True, use_mla=True)
    backend: Any = None
    try:
        CpuPlatform.get_attn_backend_cls(backend, selector)
    except NotImplementedError:
        return True
    return False


def _keep_choices(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        if not is_dsa(vllm_config):
            original(cls, vllm_config)
            return
        if uses_ula(vllm_config):
            check_parallel(vllm_config)  # vLLM is about to drop --enable-dbo with a warning
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        fields = vllm_config.model_config.hf_text_config.to_dict()
        cache.cache_dtype = row_type(fields, cache.cache_dtype)
        chosen = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        )
        original(cls, vllm_config)
        (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        ) = chosen

    return check_and_update_config


def _choices_needed() -> bool:
    import inspect

    from vllm.platforms.cpu import CpuPlatform

    source = inspect.getsource(CpuPlatform.check_and_update_config)
    return "enable_chunked_prefill = False" in source and "enable_prefix_caching = False" in source


PATCHES = (
    Patch(
        target="vllm.platforms.cpu:CpuPlatform",
        attribute="get_attn_backend_cls",
        defined_in="vllm.platforms.cpu",
        parameters=("cls", "selected_backend", "attn_selector_config", "num_heads"),
        replace=_sparse_backend,
        versions=VERSIONS,
        why="the CPU platform refuses sparse MLA before it looks at registered backends",
        remove_when="CpuPlatform asks registered backends, or has a sparse MLA backend",
        needed=_backend_needed,
    ),
    Patch(
        target="vllm.platforms.cpu:CpuPlatform",
        attribute="check_and_update_config",
        defined_in="vllm.platforms.cpu",
        parameters=("cls", "vllm_config"),
        replace=_keep_choices,
        versions=VERSIONS,
        why="the CPU platform switches chunked prefill and prefix caching off for every MLA model; "
        "our backend can do both, and no backend is asked",
        remove_when="the CPU platform asks the attention backend what it supports",
        needed=_choices_needed,
    ),
)
