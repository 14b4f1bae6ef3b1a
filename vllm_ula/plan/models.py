"""Which model: a built-in name, a Hugging Face directory or a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ula.errors import ConfigError

_GLM = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "vocab_size": 154880,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202_752,
    "quantization_config": {"quant_method": "fp8"},
}
_GLM_SHARED = {
    **_GLM,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 1_048_576,
}
_DEEPSEEK = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "vocab_size": 129280,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163_840,
    "quantization_config": {"quant_method": "fp8"},
}
_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}
_QWEN = {
    **_LLAMA,
    "model_type": "qwen2",
    "intermediate_size": 29568,
    "vocab_size": 152064,
}

_OF_GLM = "GlmMoeDsaConfig of transformers, whose defaults are those of zai-org/GLM-5; fp8 release"
_OF_GLM_SHARED = (
    f"{_OF_GLM}, with index_topk_freq 4 and offset 3: 53,940 bytes a token as in "
    "vllm-project/recipes#893"
)

BUILT_IN: dict[str, tuple[dict[str, Any], str]] = {
    "GLM-5.3": (_GLM_SHARED, _OF_GLM_SHARED),
    "GLM-5.2": (_GLM_SHARED, _OF_GLM_SHARED),
    "GLM-5.1": (_GLM, _OF_GLM),
    "GLM-5": (_GLM, _OF_GLM),
    "DeepSeek-V3.2": (
        _DEEPSEEK,
        "config.json of deepseek-ai/DeepSeek-V3.2; released in fp8",
    ),
    "Llama-3.3-70B": (
        _LLAMA,
        "config.json of meta-llama/Llama-3.3-70B-Instruct; released in bfloat16",
    ),
    "Qwen-2.5-72B": (
        _QWEN,
        "config.json of Qwen/Qwen2.5-72B; released in bfloat16",
    ),
}


@dataclass(frozen=True)
class ModelConfig:
    """Fields of a model's (text) config.

    Attributes:
        name: to print.
        source: of the fields.
        fields: as in its config.json.
    """

    name: str
    source: str
    fields: Mapping[str, Any]


def load(model: str) -> ModelConfig:
    """Find a model.

    Args:
        model: a name of `BUILT_IN` in any case, a directory with a config.json, or such a file.

    Raises:
        ConfigError: there is none, or its config is no JSON object.
    """
    for name, (fields, source) in BUILT_IN.items():
        if model.lower() == name.lower():
            return ModelConfig(name, source, fields)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        works = f"a directory with a config.json, such a file, or one of {', '.join(BUILT_IN)}"
        raise ConfigError("MODEL", model, "is no built-in name and no config", works)
    try:
        fields = json.loads(file.read_text())
        fields = fields.get("text_config", fields)
        if not isinstance(fields, dict):
            raise TypeError
    except (ValueError, AttributeError, TypeError):
        rule = "is no JSON object"
        raise ConfigError("MODEL", file, rule, "the config.json of a checkpoint") from None
    name = path.name if path.is_dir() else path.resolve().parent.name
    return ModelConfig(name or model, f"{file}", fields)
