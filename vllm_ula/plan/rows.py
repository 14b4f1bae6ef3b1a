"""What a token of a model costs: its rows and index keys, from the fields of its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vllm_ula.capacity import Model
from vllm_ula.errors import ConfigError
from vllm_ula.models import (
    FP8_ROWS,
    check_index_share,
    check_supported,
    domain_layers,
    geometry,
    row_type,
)
from vllm_ula.plan.models import ModelConfig

T = TypeVar("T")

GQA = ("llama", "qwen2", "qwen3")  # every layer has heads and rows of full attention
ROW_TYPES = (FP8_ROWS, "bf16")
_BF16_BYTES = 2


@dataclass(frozen=True)
class Tokens:
    """Bytes of a token, and what reads them.

    Attributes:
        model: for the arithmetic of all systems.
        row_type: how rows are kept, one of ROW_TYPES.
        topk: rows a token selects per layer; 0 reads all.
        indexer_layers: layers with index keys.
        mtp_layers: of those, layers that draft.
    """

    model: Model
    row_type: str
    topk: int
    indexer_layers: int
    mtp_layers: int

    @property
    def is_sparse(self) -> bool:
        """Whether tokens select what they read."""
        return self.topk > 0


def tokens_of(config: ModelConfig, kv_dtype: str | None, spec_tokens: int) -> Tokens:
    """Bytes of a token.

    Args:
        config: of the model.
        kv_dtype: one of ROW_TYPES; None takes fp8_ds_mla for sparse models, bf16 for dense ones.
        spec_tokens: drafts a step; with any, the model's MTP layers have rows and index keys.

    Raises:
        ConfigError: a field is missing, or the model or the type of its rows is not known here.
    """
    return needing_fields(config, lambda: _tokens_of(config, kv_dtype, spec_tokens))


def needing_fields(config: ModelConfig, read: Callable[[], T]) -> T:
    """Call `read`; a field it misses, or cannot use, is a ConfigError."""
    try:
        return read()
    except KeyError as error:
        rule = f"its config has no {error.args[0]}"
    except (TypeError, ValueError, AttributeError) as error:
        rule = f"its config has a field that is no such number: {error}"
    raise ConfigError("MODEL", config.name, rule, "the whole config.json of its checkpoint")


def _tokens_of(config: ModelConfig, kv_dtype: str | None, spec_tokens: int) -> Tokens:
    fields = config.fields
    if kv_dtype not in (None, *ROW_TYPES):
        rule = "is no type of rows here"
        raise ConfigError("--kv-dtype", kv_dtype, rule, f"one of {', '.join(ROW_TYPES)}")
    if fields["model_type"] in GQA:
        if kv_dtype == FP8_ROWS:
            rule = f"keeps latent rows, {config.name} has {fields['num_key_value_heads']} KV heads"
            raise ConfigError("--kv-dtype", kv_dtype, rule, "bf16")
        heads, layers = int(fields["num_key_value_heads"]), int(fields["num_hidden_layers"])
        width = int(
            fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        )
        _positive(num_key_value_heads=heads, num_hidden_layers=layers, head_dim=width)
        row = 2 * heads * width * _BF16_BYTES
        return Tokens(Model(config.name, (1,) * layers, row, 0, heads), "bf16", 0, 0, 0)
    check_supported(fields["model_type"])
    check_index_share(fields)
    mtp = int(fields.get("num_nextn_predict_layers") or 0) if spec_tokens else 0
    found = geometry(fields, mtp)
    _positive(
        num_hidden_layers=found.attention_layers - mtp,
        kv_lora_rank=found.row_width,
        index_topk=found.topk,
        index_head_dim=found.index_head_dim,
    )
    kv_dtype = row_type(fields, FP8_ROWS) if kv_dtype in (None, FP8_ROWS) else "bf16"
    domains = domain_layers(fields, mtp)
    name = "bfloat16" if kv_dtype == "bf16" else kv_dtype
    row = found.row_bytes(name, _BF16_BYTES) // found.attention_layers
    model = Model(config.name, domains, row, found.index_key_bytes)
    return Tokens(model, kv_dtype, found.topk, found.indexer_layers, mtp)


def _positive(**sizes: int) -> None:
    for key, size in sizes.items():
        if size <= 0:
            raise ValueError(f"{key}={size}")
