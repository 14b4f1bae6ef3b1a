"""What `--kv-connector ula` would say of a model: vLLM's whole config, and no weights."""

from __future__ import annotations

from pathlib import Path

import vllm_ula
from vllm_ula.doctor.check import Area, Check, Verdict


def check_model(model: str, host_gib: float) -> Check:
    """Build the engine's config.

    Args:
        model: directory of a checkpoint; nothing is downloaded.
        host_gib: of the host pool.
    """
    if not (Path(model) / "config.json").is_file():
        text = "is no directory with a config.json; give that of the checkpoint"
        return Check(Area.MODEL, model, Verdict.PROBLEM, text)
    from vllm.engine.arg_utils import EngineArgs

    from vllm_ula.compat import min_device_slots
    from vllm_ula.plugin import register

    try:
        register()
        transfer = vllm_ula.kv_transfer_config(host_gib=host_gib)
        config = EngineArgs(model=model, kv_transfer_config=transfer).create_engine_config()
    except Exception as error:  # a refusal of ours, or any of vLLM's
        lines = str(error).splitlines() or [type(error).__name__]
        return Check(Area.MODEL, model, Verdict.PROBLEM, lines[0])
    text = (
        f"accepted: rows of type {config.cache_config.cache_dtype}, blocks of "
        f"{config.cache_config.block_size}, at least {min_device_slots(config)} device rows; "
        "how much fits: vllm-ula plan"
    )
    return Check(Area.MODEL, model, Verdict.FINE, text)
