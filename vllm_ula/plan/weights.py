"""How many bytes of weights a rank holds, counted from the config.

    attention    q_a, q_b, kv_a, kv_b, o (MLA), or q, k, v, o (GQA)
    indexer      wq_b, wk and the weights of its heads, on layers that have one
    feed forward 3 h f of a dense layer; router, shared and routed experts of the others
    embeddings   2 v h, in two bytes whatever the rest has

Norms, biases and the scales of fp8 blocks (0.02 %) are not counted, and neither are the copies of
kv_b that vLLM keeps for decoding. Under DP attention the routed experts are spread over all ranks
(--enable-expert-parallel) and everything else is on each; TP divides all but down-projections,
indexers and routers. Published totals the count agrees with are in `tests/plan/test_weights.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ula.capacity import Parallel
from vllm_ula.errors import ConfigError
from vllm_ula.models import has_indexer
from vllm_ula.plan.models import ModelConfig
from vllm_ula.plan.rows import GQA, needing_fields

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_EMBEDDING_BYTES = 2


@dataclass(frozen=True)
class Weights:
    """Parameters by where they are.

    Attributes:
        experts: routed experts, spread over ranks either way.
        divided: on every rank under DP, divided under TP.
        copied: on every rank.
        embeddings: as `divided`, in two bytes.
        element_bytes: of the others.
    """

    experts: int
    divided: int
    copied: int
    embeddings: int
    element_bytes: int

    @property
    def parameters(self) -> int:
        """All of them, once."""
        return self.experts + self.divided + self.copied + self.embeddings

    @property
    def total_bytes(self) -> int:
        """Of one copy."""
        in_two = _EMBEDDING_BYTES * self.embeddings
        return in_two + self.element_bytes * (self.parameters - self.embeddings)

    def of_rank(self, parallel: Parallel, ranks: int) -> int:
        """Bytes on one rank."""
        divided = self.element_bytes * self.divided + _EMBEDDING_BYTES * self.embeddings
        if parallel is Parallel.TP:
            divided = -(-divided // ranks)
        experts = -(-self.element_bytes * self.experts // ranks)
        return experts + divided + self.element_bytes * self.copied


def weights_of(config: ModelConfig, mtp_layers: int) -> Weights:
    """Weights of a model with that many MTP layers.

    Raises:
        ConfigError: a field is missing.
    """
    return needing_fields(config, lambda: _weights_of(config, mtp_layers))


def _weights_of(config: ModelConfig, mtp_layers: int) -> Weights:
    f = config.fields
    h, layers = int(f["hidden_size"]), int(f["num_hidden_layers"])
    embeddings = 2 * int(f["vocab_size"]) * h
    width = _element_bytes(config)
    dense = 3 * h * int(f["intermediate_size"])
    if f["model_type"] in GQA:
        heads = int(f["num_attention_heads"])
        head = int(f.get("head_dim") or h // heads)
        attention = 2 * h * head * (heads + int(f["num_key_value_heads"]))
        return Weights(0, layers * (attention + dense), 0, embeddings, width)

    divided, copied = _attention(config)
    index = int(f["index_n_heads"]) * int(f["index_head_dim"])
    indexer = int(f["q_lora_rank"]) * index + h * (int(f["index_head_dim"]) + f["index_n_heads"])
    indexers = sum(has_indexer(f, layer) for layer in range(layers)) + mtp_layers
    first_dense = min(int(f["first_k_dense_replace"]), layers)
    sparse = layers - first_dense + mtp_layers
    expert, routed = 3 * h * int(f["moe_intermediate_size"]), int(f["n_routed_experts"])
    shared = expert * int(f.get("n_shared_experts") or 0)
    joining = 2 * h * h * mtp_layers  # eh_proj: the last hidden state beside the next token
    return Weights(
        experts=sparse * routed * expert,
        divided=(layers + mtp_layers) * divided + first_dense * dense + sparse * shared,
        copied=(layers + mtp_layers) * copied + indexers * indexer + sparse * routed * h + joining,
        embeddings=embeddings,
        element_bytes=width,
    )


def _element_bytes(config: ModelConfig) -> int:
    method = (config.fields.get("quantization_config") or {}).get("quant_method")
    dtype = str(config.fields.get("torch_dtype") or config.fields.get("dtype") or "bfloat16")
    found = 1 if method == "fp8" else None if method else _BYTES.get(dtype)
    if found is None:
        rule = f"how many bytes its weights take is not known here ({method or dtype})"
        raise ConfigError("MODEL", config.name, rule, "--weights-gib or --kv-gib-per-gpu with it")
    return found


def _attention(config: ModelConfig) -> tuple[int, int]:
    """Parameters of one MLA layer that TP divides, and those it copies."""
    f = config.fields
    h, heads = int(f["hidden_size"]), int(f["num_attention_heads"])
    q, kv, rope = int(f["q_lora_rank"]), int(f["kv_lora_rank"]), int(f["qk_rope_head_dim"])
    nope, value = int(f["qk_nope_head_dim"]), int(f["v_head_dim"])
    divided = heads * (q * (nope + rope) + kv * (nope + value) + value * h)
    return divided, h * q + h * (kv + rope)
