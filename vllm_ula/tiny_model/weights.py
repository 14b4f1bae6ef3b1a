"""The weights of the tiny model: one table of shapes and distributions, drawn by seed and name.

What the draw is arranged for:

* Selections do not hang on ties. An index score is exactly 0 where all heads reject a row, one row
  in 16, and which of the ties are selected is up to the kernel; so the second half of the index
  heads has the opposite queries of the first.
* Completions are ASCII and as long as was asked for. Hidden states keep a positive mean, because
  embeddings have one and what layers add has none, and the unprintable tokens, end-of-text among
  them, lean away from it.
* Drafts are right often enough: after a printable byte the next one (`b` after `a`) is favoured,
  by the main model and by MTP layers. 45 % of the drafts of `num_speculative_tokens` 1 are
  accepted, 24 % of those of 4.
"""

import hashlib
from typing import NamedTuple

import torch

from vllm_ula.tiny_model.options import TinyModelOptions

HIDDEN = 256
NUM_HEADS = 4
Q_LORA_RANK = 128
KV_LORA_RANK = 512
NOPE_DIM = 64
ROPE_DIM = 64
VALUE_DIM = 64
NUM_INDEX_HEADS = 4
INDEX_DIM = 128
DENSE_INTERMEDIATE = 512
EXPERT_INTERMEDIATE = 128
NUM_EXPERTS = 4
EXPERTS_PER_TOKEN = 2
NUM_DENSE_LAYERS = 1

VOCAB = 320
PRINTABLE = slice(0x20, 0x7F)


class _Normal(NamedTuple):
    """A weight drawn from N(mean, std).

    `zero_sum_dim` names the dimension along which the draw's own mean is taken out first.
    """

    shape: tuple[int, ...]
    std: float = 0.1
    mean: float = 0.0
    zero_sum_dim: int | None = None


class _Ones(NamedTuple):
    """A norm's weight."""

    shape: tuple[int, ...]


_Weight = _Normal | _Ones
_Table = dict[str, _Weight]

_ATTENTION: _Table = {
    "self_attn.q_a_proj.weight": _Normal((Q_LORA_RANK, HIDDEN)),
    "self_attn.q_a_layernorm.weight": _Ones((Q_LORA_RANK,)),
    "self_attn.q_b_proj.weight": _Normal((NUM_HEADS * (NOPE_DIM + ROPE_DIM), Q_LORA_RANK)),
    "self_attn.kv_a_proj_with_mqa.weight": _Normal((KV_LORA_RANK + ROPE_DIM, HIDDEN)),
    "self_attn.kv_a_layernorm.weight": _Ones((KV_LORA_RANK,)),
    "self_attn.kv_b_proj.weight": _Normal((NUM_HEADS * (NOPE_DIM + VALUE_DIM), KV_LORA_RANK)),
    "self_attn.o_proj.weight": _Normal((HIDDEN, NUM_HEADS * VALUE_DIM), zero_sum_dim=0),
}

_INDEXER: _Table = {
    "self_attn.indexer.wq_b.weight": _Normal((NUM_INDEX_HEADS // 2 * INDEX_DIM, Q_LORA_RANK)),
    "self_attn.indexer.wk.weight": _Normal((INDEX_DIM, HIDDEN)),
    "self_attn.indexer.k_norm.weight": _Ones((INDEX_DIM,)),
    "self_attn.indexer.k_norm.bias": _Normal((INDEX_DIM,)),
    "self_attn.indexer.weights_proj.weight": _Normal((NUM_INDEX_HEADS, HIDDEN)),
}

_MTP: _Table = {
    "enorm.weight": _Ones((HIDDEN,)),
    "hnorm.weight": _Ones((HIDDEN,)),
    "eh_proj.weight": _Normal((HIDDEN, 2 * HIDDEN), zero_sum_dim=0),
    "shared_head.norm.weight": _Ones((HIDDEN,)),
}


def state_dict(options: TinyModelOptions) -> dict[str, torch.Tensor]:
    """Every weight by its checkpoint name.

    A weight depends on the seed and its name only: the main model is the same with and without MTP
    layers or IndexShare, and its first layers whatever their number.
    """
    weights = {name: _draw(name, weight, options.seed) for name, weight in _table(options).items()}
    for name, weight in weights.items():
        if name.endswith("indexer.wq_b.weight"):
            weights[name] = torch.cat([weight, -weight])
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] += _head_leaning(embedding)
    for layer in range(options.layers, options.layers + options.mtp):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.embed_tokens.weight"] = embedding.clone()
        weights[f"{prefix}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
        weights[f"{prefix}.eh_proj.weight"][:, :HIDDEN] += 2.0 * torch.eye(HIDDEN)
    return {name: weights[name].to(_dtype_of(name, options)) for name in sorted(weights)}


def _draw(name: str, weight: _Weight, seed: int) -> torch.Tensor:
    if isinstance(weight, _Ones):
        return torch.ones(weight.shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    drawn = torch.randn(weight.shape, generator=generator) * weight.std
    if weight.zero_sum_dim is not None:
        drawn -= drawn.mean(weight.zero_sum_dim, keepdim=True)
    return drawn + weight.mean


def _head_leaning(embedding: torch.Tensor) -> torch.Tensor:
    """What lm_head has beyond its draw (see the module): [VOCAB, HIDDEN] float32."""
    leaning = torch.full((VOCAB, HIDDEN), -0.3)
    direction = embedding - embedding.mean(1, keepdim=True)
    direction /= direction.norm(dim=1, keepdim=True)
    leaning[PRINTABLE] = 2.0 * direction[PRINTABLE].roll(1, dims=0)
    return leaning


def _dtype_of(name: str, options: TinyModelOptions) -> torch.dtype:
    """The routing bias is float32 in every checkpoint: both loaders keep it so."""
    if name.endswith("e_score_correction_bias"):
        return torch.float32
    dtype: torch.dtype = getattr(torch, options.dtype)
    return dtype


def _table(options: TinyModelOptions) -> _Table:
    """All weights that are drawn; MTP layers also hold copies of the embedding and of lm_head."""
    table: _Table = {
        "model.embed_tokens.weight": _Normal((VOCAB, HIDDEN), std=2.0, mean=0.4, zero_sum_dim=1),
        "model.norm.weight": _Ones((HIDDEN,)),
        "lm_head.weight": _Normal((VOCAB, HIDDEN)),
    }
    for layer in range(options.layers + options.mtp):
        for name, weight in _layer_table(layer, options).items():
            table[f"model.layers.{layer}.{name}"] = weight
    return table


def _layer_table(layer: int, options: TinyModelOptions) -> _Table:
    norms: _Table = {
        "input_layernorm.weight": _Ones((HIDDEN,)),
        "post_attention_layernorm.weight": _Ones((HIDDEN,)),
    }
    indexer = _INDEXER if options.has_indexer(layer) else {}
    mlp = _mlp_table("mlp", DENSE_INTERMEDIATE) if layer < NUM_DENSE_LAYERS else _moe_table()
    mtp = _MTP if layer >= options.layers else {}
    return norms | _ATTENTION | indexer | mlp | mtp


def _moe_table() -> _Table:
    table: _Table = {
        "mlp.gate.weight": _Normal((NUM_EXPERTS, HIDDEN)),
        "mlp.gate.e_score_correction_bias": _Normal((NUM_EXPERTS,)),
    }
    for expert in range(NUM_EXPERTS):
        table |= _mlp_table(f"mlp.experts.{expert}", EXPERT_INTERMEDIATE)
    return table | _mlp_table("mlp.shared_experts", EXPERT_INTERMEDIATE)


def _mlp_table(name: str, intermediate: int) -> _Table:
    return {
        f"{name}.gate_proj.weight": _Normal((intermediate, HIDDEN)),
        f"{name}.up_proj.weight": _Normal((intermediate, HIDDEN)),
        f"{name}.down_proj.weight": _Normal((HIDDEN, intermediate), zero_sum_dim=0),
    }
