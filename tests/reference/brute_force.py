"""A plain, slow glm_moe_dsa: the whole model from its checkpoint, with no cache to get wrong.

Every layer keeps its history as one contiguous tensor, scores all of it with the fp8 index keys
vLLM stores, takes `torch.topk`, and attends to the selected rows only. Nothing here comes from
vllm_ula, vLLM or transformers, so agreeing with it means something.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

FP8_MAX = 448.0
INDEX_NORM_EPS = 1e-6
TOKENS_PER_CHUNK = 128

EditRows = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class IndexerInput:
    """What one layer's indexer sees.

    Attributes:
        hidden: [T, hidden_size] float32, after the layer's input norm.
        q_latent: [T, q_lora_rank] float32, after the query latent's norm.
    """

    hidden: torch.Tensor
    q_latent: torch.Tensor


@dataclass(frozen=True)
class Output:
    """One forward pass over a prompt of T tokens.

    Attributes:
        logits: [T, vocab_size] float32.
        selections: One [T, index_topk] int64 tensor a layer: positions, unordered, -1 padded.
            A layer that reuses a selection holds the one it reused.
        indexer_inputs: What the indexer of each layer that has one saw, by layer.
    """

    logits: torch.Tensor
    selections: list[torch.Tensor]
    indexer_inputs: dict[int, IndexerInput]


class Model:
    """The main model of a checkpoint, computed in float32 whatever dtype the weights have.

    Args:
        directory: A Hugging Face directory with config.json and model.safetensors.
    """

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        weights = load_file(directory / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in weights.items()}

    @torch.inference_mode()
    def forward(
        self,
        token_ids: list[int],
        selections: list[torch.Tensor] | None = None,
        edit_rows: EditRows | None = None,
    ) -> Output:
        """Runs the prompt in one pass.

        Args:
            token_ids: T token ids.
            selections: Used instead of the indexers', in the form of `Output.selections`.
            edit_rows: Called as `edit_rows(layer, rows)` with a copy of the layer's history rows
                [T, kv_lora_rank + qk_rope_head_dim] float32; attention reads what it returns. This
                is how a test corrupts a row.

        Returns:
            Logits, the selections that were used, and what the indexers saw.
        """
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        used: list[torch.Tensor] = []
        seen: dict[int, IndexerInput] = {}
        for layer in range(self.config["num_hidden_layers"]):
            x = self._norm(hidden, f"model.layers.{layer}.input_layernorm")
            q_latent = self._q_latent(layer, x)
            if self._has_indexer(layer):
                seen[layer] = IndexerInput(x, q_latent)
            if selections is not None:
                used.append(selections[layer])
            elif self._has_indexer(layer):
                used.append(self.select(layer, seen[layer]))
            else:
                used.append(used[-1])
            rows = self._history_rows(layer, x)
            if edit_rows is not None:
                rows = edit_rows(layer, rows.clone())
            hidden = hidden + self._attend(layer, q_latent, rows, used[-1])
            x = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm")
            hidden = hidden + self._feed_forward(layer, x)
        hidden = self._norm(hidden, "model.norm")
        return Output(self._linear(hidden, "lm_head"), used, seen)

    def prompt_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probability of each prompt token after the first, given those before it: [T - 1]."""
        return next_token_logprobs(self.forward(token_ids).logits, token_ids)

    @torch.inference_mode()
    def select(self, layer: int, seen: IndexerInput) -> torch.Tensor:
        """The indexer of one layer over a whole prompt: [T, index_topk] int64, -1 padded."""
        heads, dim = self.config["index_n_heads"], self.config["index_head_dim"]
        name = f"model.layers.{layer}.self_attn.indexer"
        query = self._linear(seen.q_latent, f"{name}.wq_b").view(-1, heads, dim)
        key = F.layer_norm(
            self._linear(seen.hidden, f"{name}.wk"),
            (dim,),
            self.weights[f"{name}.k_norm.weight"],
            self.weights[f"{name}.k_norm.bias"],
            INDEX_NORM_EPS,
        )
        query, query_scale = quantise_fp8(self._rotate_index(query))
        key, key_scale = quantise_fp8(self._rotate_index(key.unsqueeze(1)).squeeze(1))
        weights = self._linear(seen.hidden, f"{name}.weights_proj")
        weights = weights * query_scale * dim**-0.5 * heads**-0.5
        return top_positions(
            index_scores(query, key, weights, key_scale), self.config["index_topk"]
        )

    def _has_indexer(self, layer: int) -> bool:
        return f"model.layers.{layer}.self_attn.indexer.wk.weight" in self.weights

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        normed = x * torch.rsqrt(mean_square + self.config["rms_norm_eps"])
        return normed * self.weights[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates [T, heads, rope] by position; neighbouring elements form a pair."""
        theta = self.config["rope_parameters"]["rope_theta"]
        width = x.shape[-1]
        inv_freq = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
        angle = torch.arange(len(x)).float()[:, None, None] * inv_freq
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

    def _rotate_index(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates the first qk_rope_head_dim elements of [T, heads, index_head_dim]."""
        rope = self.config["qk_rope_head_dim"]
        return torch.cat([self._rotate(x[..., :rope]), x[..., rope:]], dim=-1)

    def _q_latent(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{layer}.self_attn"
        return self._norm(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")

    def _history_rows(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """What a KV cache holds for each token: normed latent, then rotated key."""
        name = f"model.layers.{layer}.self_attn"
        rank = self.config["kv_lora_rank"]
        latent_and_key = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        latent = self._norm(latent_and_key[:, :rank], f"{name}.kv_a_layernorm")
        rope_key = self._rotate(latent_and_key[:, rank:].unsqueeze(1)).squeeze(1)
        return torch.cat([latent, rope_key], dim=-1)

    def _attend(
        self, layer: int, q_latent: torch.Tensor, rows: torch.Tensor, selection: torch.Tensor
    ) -> torch.Tensor:
        """Multi-head attention of every token over its selected rows: [T, hidden_size]."""
        config, name = self.config, f"model.layers.{layer}.self_attn"
        heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        query = self._linear(q_latent, f"{name}.q_b_proj").view(-1, heads, nope + rope)
        query = torch.cat([query[..., :nope], self._rotate(query[..., nope:])], dim=-1)
        expanded = self._linear(rows[:, :rank], f"{name}.kv_b_proj").view(len(rows), heads, -1)
        rope_key = rows[:, None, rank:].expand(-1, heads, -1)
        key = torch.cat([expanded[..., :nope], rope_key], dim=-1).transpose(0, 1).contiguous()
        value = expanded[..., nope:].transpose(0, 1).contiguous()
        chunks = [
            attend_selected(q, key, value, s, (nope + rope) ** -0.5)
            for q, s in zip(
                query.split(TOKENS_PER_CHUNK), selection.split(TOKENS_PER_CHUNK), strict=True
            )
        ]
        return self._linear(torch.cat(chunks).flatten(1), f"{name}.o_proj")

    def _feed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{layer}.mlp"
        if layer < self.config["first_k_dense_replace"]:
            return self._gated(x, name)
        return self._routed(x, name) + self._gated(x, f"{name}.shared_experts")

    def _gated(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = F.silu(self._linear(x, f"{name}.gate_proj"))
        return self._linear(gate * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _routed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """noaux_tc routing with one group: the bias chooses the experts, not their weights."""
        scores = self._linear(x, f"{name}.gate").sigmoid()
        biased = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        chosen = biased.topk(self.config["num_experts_per_tok"], dim=-1).indices
        share = scores.gather(1, chosen)
        share = share / share.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        share_of = torch.zeros_like(scores).scatter(1, chosen, share)
        experts = range(self.config["n_routed_experts"])
        return sum(
            (self._gated(x, f"{name}.experts.{e}") * share_of[:, e, None] for e in experts),
            start=torch.zeros_like(x),
        )


def next_token_logprobs(logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """Picks from logits [T, vocab] the log-probability of each following token: [T - 1] float32."""
    following = torch.tensor(token_ids[1:])[:, None]
    return logits[:-1].float().log_softmax(-1).gather(1, following).squeeze(1)


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds [..., 128] to e4m3 with one power-of-two scale a group of 128.

    Returns:
        The e4m3 values as float32 [..., 128], and the scales float32 [...].
    """
    largest = x.abs().amax(-1).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
    values = (x / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.float(), scale


def index_scores(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, key_scale: torch.Tensor
) -> torch.Tensor:
    """sum over heads of weight * relu(query . key), times the key's scale, causal.

    Args:
        query: [T, heads, dim] float32, e4m3 values.
        key: [T, dim] float32, e4m3 values.
        weights: [T, heads] float32, with the query's scale already in.
        key_scale: [T] float32.

    Returns:
        [T, T] float32: a token's score of every position, -inf for later ones.
    """
    scores = torch.zeros(len(query), len(key))
    for head in range(query.shape[1]):
        scores += weights[:, head, None] * torch.relu(query[:, head] @ key.T)
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return (scores * key_scale).masked_fill(later, -torch.inf)


def top_positions(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """The best topk positions of each token's scores [T, T]: [T, topk] int64, -1 padded."""
    best = scores.topk(min(topk, scores.shape[1]), dim=-1)
    positions = best.indices.masked_fill(best.values == -torch.inf, -1)
    return F.pad(positions, (0, topk - positions.shape[1]), value=-1)


def attend_selected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    selection: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Softmax attention of t tokens, each over its own selected rows.

    Args:
        query: [t, heads, nope + rope] float32.
        key: [heads, T, nope + rope] float32.
        value: [heads, T, v] float32.
        selection: [t, topk] int64 positions, -1 padded.
        scale: Multiplies the dot products.

    Returns:
        [t, heads, v] float32.
    """
    selection = selection[:, (selection >= 0).any(0)]
    position = selection.clamp(min=0)
    scores = (key[:, position] @ query.transpose(0, 1).unsqueeze(-1)).squeeze(-1) * scale
    scores = scores.masked_fill(selection < 0, -torch.inf)
    weighted = scores.softmax(-1).unsqueeze(-2) @ value[:, position]
    return weighted.squeeze(-2).transpose(0, 1)
