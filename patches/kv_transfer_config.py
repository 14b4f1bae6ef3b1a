"""The last step of vLLM's config: host memory from `--kv-offloading-size`, and our refusals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm_ula.compat import (
    VERSIONS,
    adopt_offloading_size,
    check_connectors,
    check_engine,
    uses_ula,
)
from vllm_ula.patches.record import Patch


def _check(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _post_init_kv_transfer_config(self: Any) -> None:
        check_connectors(self)
        if not uses_ula(self):
            original(self)
            return
        adopt_offloading_size(self)
        check_engine(self)

    return _post_init_kv_transfer_config


def _needed() -> bool:
    from vllm.config import VllmConfig

    source = inspect.getsource(VllmConfig._post_init_kv_transfer_config)
    return 'config_connector = "OffloadingConnector"' in source


PATCHES = (
    Patch(
        target="vllm.config.vllm:VllmConfig",
        attribute="_post_init_kv_transfer_config",
        defined_in="vllm.config.vllm",
        parameters=("self",),
        replace=_check,
        versions=VERSIONS,
        why="--kv-offloading-size replaces the connector the user named by OffloadingConnector; a "
        "connector class has no hook that sees the finished config before weights load",
        remove_when="--kv-offloading-size keeps a named connector and connectors may check the "
        "config",
        needed=_needed,
    ),
)
