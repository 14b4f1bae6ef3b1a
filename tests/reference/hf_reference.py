"""transformers' glm_moe_dsa as a reference, with an indexer that scores as vLLM's does.

transformers scores in float; vLLM keeps index keys and queries as e4m3 with one power-of-two scale.
Up to `index_topk` tokens everything is selected and the two agree; above it `Fp8Indexer` stands in.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from reference.brute_force import IndexerInput, next_token_logprobs
from torch import nn
from transformers import AutoConfig
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


class Model:
    """A checkpoint in transformers, float32, eager attention.

    Args:
        directory: A Hugging Face directory.
        fp8_indexer: Replace the indexers by `Fp8Indexer`; otherwise transformers' own stay.
    """

    def __init__(self, directory: str | Path, fp8_indexer: bool = False) -> None:
        self.model = glm.GlmMoeDsaForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        for layer in self.model.model.layers:
            own = layer.self_attn.indexer
            if fp8_indexer and own is not None:
                layer.self_attn.indexer = Fp8Indexer.like(own)

    def prompt_logprobs(
        self, token_ids: list[int], selections: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Log-probability of each prompt token after the first, given those before it.

        Args:
            token_ids: T token ids.
            selections: Used instead of the indexers', in the form of `brute_force.Output`.

        Returns:
            [T - 1] float32.
        """
        return next_token_logprobs(self.logits(token_ids, selections), token_ids)

    @torch.inference_mode()
    def logits(
        self, token_ids: list[int], selections: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """[T, vocab_size] float32; arguments as `prompt_logprobs`."""
        own = [layer.self_attn.indexer for layer in self.model.model.layers]
        try:
            if selections is not None:
                self._set_indexers([GivenSelection(selection) for selection in selections])
            inputs = torch.tensor([token_ids])
            return self.model(input_ids=inputs, use_cache=False).logits[0]
        finally:
            self._set_indexers(own)

    @torch.inference_mode()
    def select(self, layer: int, seen: IndexerInput) -> torch.Tensor:
        """One layer's indexer on given hidden states: [T, index_topk] int64, -1 padded."""
        indexer = self.model.model.layers[layer].self_attn.indexer
        num_tokens = len(seen.hidden)
        hidden, q_latent = seen.hidden[None], seen.q_latent[None]
        positions = torch.arange(num_tokens)[None]
        rotation = self.model.model.rotary_emb(hidden, positions)
        later = torch.full((1, num_tokens, num_tokens), -torch.inf).triu(1)
        chosen = indexer(hidden, q_latent, rotation, later, positions)[0].long()
        chosen = chosen.masked_fill(chosen > positions.T, -1)
        return F.pad(chosen, (0, indexer.index_topk - chosen.shape[1]), value=-1)

    def _set_indexers(self, indexers: list[nn.Module | None]) -> None:
        for layer, indexer in zip(self.model.model.layers, indexers, strict=True):
            layer.self_attn.indexer = indexer


class Fp8Indexer(glm.GlmMoeDsaIndexer):
    """transformers' indexer with the keys and queries rounded as vLLM stores them."""

    @classmethod
    def like(cls, indexer: glm.GlmMoeDsaIndexer) -> "Fp8Indexer":
        """A copy of an indexer, weights included."""
        copy = cls(indexer.config, indexer.layer_idx)
        copy.load_state_dict(indexer.state_dict())
        return copy.eval()

    @torch.no_grad()
    def forward(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: object = None,
    ) -> torch.Tensor:
        """As the base class, whose steps it keeps: [B, S, topk] int32."""
        assert past_key_values is None
        cos, sin = position_embeddings
        rope, rest = self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
        q_rot, q_pass = q.split([rope, rest], dim=-1)
        k_rot, k_pass = k.split([rope, rest], dim=-1)
        q_rot, k_rot = glm.apply_rotary_pos_emb_interleave(q_rot, k_rot, cos, sin, unsqueeze_dim=2)
        q = round_to_e4m3(torch.cat([q_rot, q_pass], dim=-1))
        k = round_to_e4m3(torch.cat([k_rot, k_pass], dim=-1)).squeeze(2)
        scores = F.relu(q @ k.transpose(-1, -2).unsqueeze(1)) * self.softmax_scale
        weights = self.weights_proj(hidden_states) * self.n_heads**-0.5
        scores = (weights.unsqueeze(-2) @ scores).squeeze(-2) + attention_mask
        return scores.topk(min(self.index_topk, scores.shape[-1]), dim=-1).indices.int()


class GivenSelection(nn.Module):
    """An indexer that answers with a given selection [T, topk] int64, -1 padded."""

    def __init__(self, selection: torch.Tensor) -> None:
        super().__init__()
        # The answer becomes a mask, so naming a selected position twice stands for "nothing".
        self.answer = torch.where(selection >= 0, selection, selection.amax(-1, keepdim=True)).int()

    def forward(self, *_: object, **__: object) -> torch.Tensor:
        return self.answer[None]


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds each [..., 128] to e4m3 times its own power of two, and back: same shape, float32.

    The power is the smallest that keeps the largest element within e4m3; it comes from the exponent
    bits, not from a logarithm.
    """
    mantissa, exponent = torch.frexp(x.abs().amax(-1, keepdim=True) / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ldexp(x, -exponent).to(torch.float8_e4m3fn).float(), exponent)


def loading_info(directory: str | Path) -> dict[str, set[str]]:
    """What `from_pretrained` says about names: missing_keys, unexpected_keys, mismatched_keys."""
    _, info = glm.GlmMoeDsaForCausalLM.from_pretrained(
        directory,
        config=AutoConfig.from_pretrained(directory, local_files_only=True),
        output_loading_info=True,
        local_files_only=True,
    )
    return {name: set(keys) for name, keys in info.items() if name.endswith("_keys")}
