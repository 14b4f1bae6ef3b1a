"""The directory of a tiny model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vllm_ula.errors import ConfigError
from vllm_ula.tiny_model import weights
from vllm_ula.tiny_model.options import TinyModelOptions
from vllm_ula.tiny_model.tokenizer import EOS, write_byte_tokenizer


def write_tiny_model(directory: str | Path, options: TinyModelOptions | None = None) -> None:
    """Writes config, weights and tokenizer; an earlier tiny model is overwritten.

    Args:
        directory: Created if absent.
        options: Default: `TinyModelOptions()`.

    Raises:
        ConfigError: The directory holds something that is not a tiny model.
    """
    options = options or TinyModelOptions()
    directory = Path(directory)
    _refuse_foreign(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", model_config(options))
    _write_json(directory / "generation_config.json", {"eos_token_id": EOS, "pad_token_id": EOS})
    write_byte_tokenizer(directory, weights.VOCAB, options.max_positions)
    save_file(
        weights.state_dict(options), directory / "model.safetensors", metadata={"format": "pt"}
    )


def model_config(options: TinyModelOptions) -> dict[str, Any]:
    """The content of config.json; its entry `tiny_model` holds the options and marks it as ours."""
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": options.dtype,
        "vocab_size": weights.VOCAB,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "hidden_size": weights.HIDDEN,
        "num_hidden_layers": options.layers,
        "max_position_embeddings": options.max_positions,
        # transformers norms the q and kv latents with 1e-6 whatever this says; vLLM uses this.
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "num_attention_heads": weights.NUM_HEADS,
        "num_key_value_heads": weights.NUM_HEADS,
        "q_lora_rank": weights.Q_LORA_RANK,
        "kv_lora_rank": weights.KV_LORA_RANK,
        "qk_nope_head_dim": weights.NOPE_DIM,
        "qk_rope_head_dim": weights.ROPE_DIM,
        "v_head_dim": weights.VALUE_DIM,
        "index_topk": options.topk,
        "index_n_heads": weights.NUM_INDEX_HEADS,
        "index_head_dim": weights.INDEX_DIM,
        "indexer_rope_interleave": True,
        "intermediate_size": weights.DENSE_INTERMEDIATE,
        "moe_intermediate_size": weights.EXPERT_INTERMEDIATE,
        "first_k_dense_replace": weights.NUM_DENSE_LAYERS,
        "n_routed_experts": weights.NUM_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": weights.EXPERTS_PER_TOKEN,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "tiny_model": dataclasses.asdict(options),
    }
    if options.index_share is not None:
        config["index_topk_freq"] = options.index_share.freq
        config["index_skip_topk_offset"] = options.index_share.offset
    if options.mtp:
        config["num_nextn_predict_layers"] = options.mtp
    return config


def _refuse_foreign(directory: Path) -> None:
    """Keeps a slip of the path from overwriting a real model."""
    if not directory.exists() or _is_ours(directory):
        return
    if directory.is_dir() and not any(directory.iterdir()):
        return
    raise ConfigError(
        "DIR",
        directory,
        "a new or empty directory, or one that holds an earlier tiny model",
        directory / "tiny-model",
    )


def _is_ours(directory: Path) -> bool:
    config = directory / "config.json"
    try:
        return config.is_file() and "tiny_model" in json.loads(config.read_text())
    except ValueError:
        return False


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
