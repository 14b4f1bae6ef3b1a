"""One tiny checkpoint for all servers, and configs of models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 260,
    "max_position_embeddings": 4096,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
# A config.json is all there is: they are refused before anybody looks for weights or a tokenizer.
OTHER_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **MLA},
    "deepseek_v4": {"architectures": ["DeepseekV4ForCausalLM"]},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"]},
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model directories: `tiny` has weights, the others are config files by `model_type`."""
    from vllm_ula.tiny_model import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "tiny")
    for name, config in OTHER_MODELS.items():
        directory: Path = root / name
        directory.mkdir()
        text = json.dumps({"model_type": name, **SHAPE, **config})
        (directory / "config.json").write_text(text)
    return {name: str(root / name) for name in ("tiny", *OTHER_MODELS)}
