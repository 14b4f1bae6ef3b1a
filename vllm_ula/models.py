"""Which models UlaCache serves, by name, and what their layers look like: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from vllm_ula.errors import ConfigError

FP8_ROWS: Final = "fp8_ds_mla"
FP8_ROW_BYTES, FP8_ROW_WIDTH = 656, 576  # 512 of latent and 64 of rope; see kernels/reference
# Values of --kv-cache-dtype: `auto` is the model's dtype, `fp8` is vLLM's short name for fp8 rows.
RowType = Literal["auto", "float16", "bfloat16", "fp8", "fp8_ds_mla"]
ROW_TYPES: tuple[RowType, ...] = get_args(RowType)

SUPPORTED = ("deepseek_v32", "glm_moe_dsa")
DSA = (*SUPPORTED, "deepseek_mtp")  # vLLM's name for the MTP layers of both

_REFUSED = {
    "deepseek_v4": "keeps compressed rows, which ula does not address yet",
    "deepseek_v41": "keeps compressed rows, which ula does not address yet",
    "glm5next": "pools its index keys, which ula does not address yet",
    "qwen3_next": "is a hybrid with recurrent state, which has no rows to address",
    "kimi_linear": "is a hybrid with recurrent state, which has no rows to address",
}


@dataclass(frozen=True)
class Geometry:
    """The DSA layers of a model.

    Attributes:
        attention_layers: layers with rows, MTP layers included.
        indexer_layers: layers with index keys, MTP layers included.
        row_width: elements of a row, latent and rope.
        topk: rows a token reads per layer.
        index_head_dim: elements of an index key.
    """

    attention_layers: int
    indexer_layers: int
    row_width: int
    topk: int
    index_head_dim: int

    def row_bytes(self, row_type: str, itemsize: int) -> int:
        """Bytes of one token's rows over all layers, k.

        Args:
            row_type: from `row_type`.
            itemsize: bytes of an element of the model's dtype, which rows of type `auto` have.
        """
        if row_type == FP8_ROWS:
            return self.attention_layers * FP8_ROW_BYTES
        return self.attention_layers * self.row_width * (itemsize if row_type == "auto" else 2)

    @property
    def index_key_bytes(self) -> int:
        """Bytes of one token's index keys over all layers, i: fp8 values and an fp32 scale."""
        return self.indexer_layers * (self.index_head_dim + 4)


def check_supported(model_type: str) -> None:
    """Refuse models by name.

    Raises:
        ConfigError: the model is not a supported DeepSeek-Sparse-Attention model.
    """
    if model_type in SUPPORTED:
        return
    reason = _REFUSED.get(model_type, "has no DeepSeek Sparse Attention ula knows")
    raise ConfigError(
        "model",
        model_type,
        reason,
        f"a model of type {' or '.join(SUPPORTED)} (DeepSeek-V3.2, GLM-5.x), or no ula connector",
    )


def row_type(config: Mapping[str, Any], name: str) -> str:
    """How a model's rows are kept, from `--kv-cache-dtype`.

    Args:
        config: fields of the (text) config.
        name: one of ROW_TYPES.

    Raises:
        ConfigError: the name is none of them, or the model's rows do not fit the type.
    """
    if name not in ROW_TYPES:
        works = f"one of {', '.join(ROW_TYPES)}"
        raise ConfigError("--kv-cache-dtype", name, "is no type of rows of a DSA model here", works)
    if name not in ("fp8", FP8_ROWS):
        return name
    width = geometry(config).row_width
    if width != FP8_ROW_WIDTH:
        rule = f"keeps rows of {FP8_ROW_WIDTH} elements, the model has {width}"
        raise ConfigError("--kv-cache-dtype", name, rule, "auto")
    return FP8_ROWS


def check_index_share(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if the first layer reuses a selection: there is none before it."""
    if has_indexer(config, 0):
        return
    rule = "the first layer has no selection to reuse"
    pattern, offset = config.get("index_topk_pattern"), config.get("index_skip_topk_offset")
    if pattern is None:
        raise ConfigError("index_skip_topk_offset", offset, rule, 1)
    raise ConfigError("index_topk_pattern", pattern, rule, f"F{pattern[1:]}")


def geometry(config: Mapping[str, Any], mtp_layers: int = 0) -> Geometry:
    """Geometry of a model from the fields of its Hugging Face config.

    Args:
        config: fields of the (text) config.
        mtp_layers: multi-token-prediction layers that are loaded.
    """
    layers = int(config["num_hidden_layers"])
    indexers = sum(has_indexer(config, layer) for layer in range(layers))
    return Geometry(
        attention_layers=layers + mtp_layers,
        indexer_layers=indexers + mtp_layers,
        row_width=int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"]),
        topk=int(config["index_topk"]),
        index_head_dim=int(config["index_head_dim"]),
    )


def domain_layers(config: Mapping[str, Any], mtp_layers: int = 0) -> tuple[int, ...]:
    """Layers of each domain in order: one with an indexer, and those that reuse its selection."""
    domains: list[int] = []
    for layer in range(int(config["num_hidden_layers"])):
        if has_indexer(config, layer):
            domains.append(1)
        else:
            domains[-1] += 1
    return (*domains, *[1] * mtp_layers)


def has_indexer(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a backbone layer selects for itself or reuses the selection before it."""
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return layer >= len(pattern) or pattern[layer] != "S"
    frequency = config.get("index_topk_freq") or 1
    offset = config.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return bool(max(layer - offset + 1, 0) % frequency == 0)
