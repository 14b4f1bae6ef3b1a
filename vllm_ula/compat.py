"""What UlaCache needs of vLLM and of the machine: the one module that knows the version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_ula.capacity import GIB, TokenBytes, ceil_to, fit
from vllm_ula.capacity import min_device_slots as _min_device_slots
from vllm_ula.config import UlaConfig, check_every_step, check_record_directory
from vllm_ula.errors import ConfigError, VersionError
from vllm_ula.host_memory import available_host_bytes, check_host_memory
from vllm_ula.models import DSA, check_index_share, check_supported, geometry, row_type
from vllm_ula.planning.make import check_planner
from vllm_ula.traces.format import import_pyarrow

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR, MULTI = "ula", "MultiConnector"
VERSIONS = ">=0.32,<0.34"
_LOWEST, _BEYOND = (0, 32), (0, 34)


def check_version(version: str) -> None:
    """Raise VersionError unless UlaCache was written for this vLLM."""
    try:
        found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        found = (0, 0)
    if not _LOWEST <= found < _BEYOND:
        raise VersionError(f"vllm-ula supports vLLM {VERSIONS}, found {version}")


def _connectors(vllm_config: VllmConfig) -> list[dict[str, Any]]:
    """The engine's connectors as a MultiConnector lists them: what is changed in one, stays."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return []
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == MULTI:
        connectors: list[dict[str, Any]] = extra.get("connectors", [])
        return connectors
    alone = {"kv_connector": transfer.kv_connector, "kv_role": transfer.kv_role}
    return [{**alone, "kv_connector_extra_config": extra}]


def _ula(vllm_config: VllmConfig) -> dict[str, Any]:
    """UlaCache's own entry in that list."""
    return next(c for c in _connectors(vllm_config) if c.get("kv_connector") == CONNECTOR)


def uses_ula(vllm_config: VllmConfig) -> bool:
    """Whether UlaCache is the engine's connector, or one of those of its MultiConnector."""
    return any(c.get("kv_connector") == CONNECTOR for c in _connectors(vllm_config))


def ula_config(vllm_config: VllmConfig) -> UlaConfig:
    """Settings of an engine with UlaCache.

    Raises:
        ConfigError: a setting breaks a rule.
    """
    return UlaConfig.from_extra_config(_ula(vllm_config).get("kv_connector_extra_config", {}))


def is_dsa(vllm_config: VllmConfig) -> bool:
    """Whether the model is one of the DeepSeek-Sparse-Attention models served here."""
    model = vllm_config.model_config
    if model is None or model.hf_text_config.model_type not in DSA:
        return False
    return hasattr(model.hf_text_config, "index_topk")


def map_device(vllm_config: VllmConfig) -> torch.device:
    """Where an engine's device rows and maps live."""
    return torch.device(vllm_config.device_config.device_type)


def min_device_slots(vllm_config: VllmConfig) -> int:
    """D_min of an engine: one selection and one row per token of the largest decode step."""
    from vllm.v1.attention.backend import max_decode_query_len

    scheduler = vllm_config.scheduler_config
    tokens = min(
        scheduler.max_num_seqs * max_decode_query_len(vllm_config),
        scheduler.max_num_batched_tokens,
    )
    topk = vllm_config.model_config.hf_text_config.index_topk
    return _min_device_slots(topk, tokens, vllm_config.cache_config.block_size)


def adopt_offloading_size(vllm_config: VllmConfig) -> None:
    """Move `--kv-offloading-size` to `host_gib`.

    Raises:
        ConfigError: both are given, or the backend is not vLLM's native one.
    """
    cache = vllm_config.cache_config
    size = cache.kv_offloading_size
    if size is None:
        return
    if cache.kv_offloading_backend != "native":
        raise ConfigError(
            "--kv-offloading-backend",
            cache.kv_offloading_backend,
            "is another way to use host memory than the ula connector",
            "--kv-offloading-backend native with --kv-connector ula",
        )
    extra = _ula(vllm_config).setdefault("kv_connector_extra_config", {})
    if extra.setdefault("host_gib", size) != size:
        raise ConfigError(
            "--kv-offloading-size",
            size,
            f"host_gib={extra['host_gib']} sets the host pool too",
            "one of the two",
        )


def check_connectors(vllm_config: VllmConfig) -> None:
    """Raise ConfigError if a connector beside UlaCache may move KV: it would move other rows."""
    connectors = _connectors(vllm_config)
    with_ula = [connector for connector in connectors if _holds_ula(connector)]
    if not with_ula:
        return
    value = f"{MULTI}({', '.join(str(c.get('kv_connector')) for c in connectors)})"
    if len(with_ula) > 1 or not uses_ula(vllm_config):
        rule = "an engine has one UlaCache, in the outermost list"
        raise ConfigError("kv_connector", value, rule, "ula once, beside the other connectors")
    for connector in connectors:
        if connector is not with_ula[0] and not _moves_no_kv(connector):
            raise ConfigError(
                "kv_connector",
                value,
                f"{connector.get('kv_connector')} may read or write KV tensors by block id, and "
                "under ula a block id is no place",
                "ula alone (--kv-connector ula), or beside connectors whose class says "
                "moves_kv = False",
            )


def _holds_ula(connector: dict[str, Any]) -> bool:
    if connector.get("kv_connector") != MULTI:
        return connector.get("kv_connector") == CONNECTOR
    extra = connector.get("kv_connector_extra_config", {})
    return any(_holds_ula(child) for child in extra.get("connectors", []))


def _moves_no_kv(connector: dict[str, Any]) -> bool:
    """Whether the connector's own class says so; a subclass may move what its base does not."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        found = KVConnectorFactory.get_connector_class(KVTransferConfig(**connector))
    except ImportError:
        if connector.get("kv_connector_module_path"):
            raise
        return False  # one of vLLM's that needs a package which is not installed
    return vars(found).get("moves_kv") is False


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse what UlaCache cannot serve, before anything is loaded.

    Raises:
        ConfigError: with key, value, rule and a value that works.
        TraceError: a recording is asked for and pyarrow is missing.
    """
    check_every_step()
    config = ula_config(vllm_config)
    model = vllm_config.model_config
    check_supported(model.hf_text_config.model_type)
    check_parallel(vllm_config)
    assert vllm_config.kv_transfer_config is not None
    for role in (vllm_config.kv_transfer_config.kv_role, _ula(vllm_config).get("kv_role")):
        if role != "kv_both":
            raise ConfigError("kv_role", role, "ula hands no KV to other engines", "kv_both")
    if vllm_config.attention_config.hisparse_config is not None:
        raise ConfigError(
            "hisparse_config", "set", "HiSparse manages the same rows as ula", "one of the two"
        )
    if model.enable_sleep_mode:
        raise ConfigError(
            "--enable-sleep-mode",
            True,
            "vLLM would discard device rows and keep the host pool and the maps",
            "no --enable-sleep-mode",
        )
    fields = model.hf_text_config.to_dict()
    check_index_share(fields)
    row_type(fields, vllm_config.cache_config.cache_dtype)
    check_planner(config, map_device(vllm_config))
    _check_device(vllm_config, config)
    _check_record(vllm_config, config)
    check_host_memory(config.host_gib, available_host_bytes())


def check_parallel(vllm_config: VllmConfig) -> None:
    """Raise ConfigError for ways to parallelise that UlaCache does not serve."""
    parallel = vllm_config.parallel_config
    sizes = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
        "--tensor-parallel-size": parallel.tensor_parallel_size,  # last: DCP is named before it
    }
    for key, size in sizes.items():
        if size > 1:
            raise ConfigError(key, size, "ula serves one rank per engine", 1)
    if parallel.use_ubatching:
        key, value, works = (
            ("--enable-dbo", True, "no --enable-dbo")
            if parallel.enable_dbo
            else ("--ubatch-size", parallel.ubatch_size, 0)
        )
        rule = "two batches at once would change homes under each other"
        raise ConfigError(key, value, rule, works)


def _check_device(vllm_config: VllmConfig, config: UlaConfig) -> None:
    block_size = vllm_config.cache_config.block_size
    needed = min_device_slots(vllm_config)
    if config.device_slots is not None:
        rule = (
            f"a decode step needs {needed} device rows (index_topk and one per decode token), "
            f"in whole blocks of {block_size}"
        )
        if config.device_slots < needed:
            raise ConfigError("device_slots", config.device_slots, rule, f"at least {needed}")
        if config.device_slots % block_size:
            works = ceil_to(config.device_slots, block_size)
            raise ConfigError("device_slots", config.device_slots, rule, works)
    if config.device_gib is not None:
        token = expected_token_bytes(vllm_config)
        fit(token, int(config.device_gib * GIB), 0, block_size, needed)


def _check_record(vllm_config: VllmConfig, config: UlaConfig) -> None:
    if config.record is None:
        return
    engines = vllm_config.parallel_config.data_parallel_size
    if engines > 1:
        rule = f"{engines} data-parallel engines would write into one directory"
        raise ConfigError("record", config.record, rule, "--data-parallel-size 1")
    check_record_directory(config.record)
    import_pyarrow()


def expected_token_bytes(vllm_config: VllmConfig) -> TokenBytes:
    """Bytes one token will cost, from the model's config alone; maps are not counted."""
    from vllm.utils.torch_utils import get_dtype_size

    speculative = vllm_config.speculative_config
    hf_config: dict[str, Any] = vllm_config.model_config.hf_text_config.to_dict()
    mtp = speculative is not None and speculative.method == "mtp"
    layers = geometry(hf_config, hf_config.get("num_nextn_predict_layers", 0) if mtp else 0)
    rows = row_type(hf_config, vllm_config.cache_config.cache_dtype)
    dtype = vllm_config.model_config.dtype
    assert not isinstance(dtype, str)
    return TokenBytes(layers.row_bytes(rows, get_dtype_size(dtype)), layers.index_key_bytes)
