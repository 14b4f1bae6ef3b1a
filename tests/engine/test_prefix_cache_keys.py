"""Public report X02 as a kind: what a prefix-cache hit must agree in, besides the tokens.

Each variant is sent twice. The first time nobody has its rows, however much it has in common with
another; the second time it gets its own back, from device and host, and nobody else's.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import Completion, assert_same, completion_of, engine, metrics, prefix_hits
from safetensors.torch import save_file

pytestmark = pytest.mark.engine

HIDDEN, RANK, LENGTH, BLOCK_SIZE = 256, 8, 97, 16
TOKENS = [random.Random(97).randrange(256) for _ in range(LENGTH)]
EMBEDS = torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(97))
NEARLY = EMBEDS.clone()
NEARLY[0, 0] += 1e-3


@dataclass(frozen=True)
class Variant:
    """A prompt: tokens or their embeddings, and what it is sent with."""

    tokens: list[int] | None = None
    salt: str | None = None
    adapter: str | None = None
    embeds: torch.Tensor | None = None

    @property
    def prompt(self) -> dict[str, Any]:
        """As `LLM.generate` takes it."""
        fields = {
            "prompt_token_ids": self.tokens,
            "prompt_embeds": self.embeds,
            "cache_salt": self.salt,
        }
        return {name: value for name, value in fields.items() if value is not None}


VARIANTS = {
    "tokens": Variant(TOKENS),
    "last token of the first block": Variant([*TOKENS[:15], TOKENS[15] ^ 1, *TOKENS[16:]]),
    "salt x": Variant(TOKENS, salt="x"),
    "salt y": Variant(TOKENS, salt="y"),
    "salt like adapter a": Variant(TOKENS, salt="a"),
    "adapter a": Variant(TOKENS, adapter="a"),
    "adapter b": Variant(TOKENS, adapter="b"),
    "adapter a, salt x": Variant(TOKENS, salt="x", adapter="a"),
    "adapter a, salt a": Variant(TOKENS, salt="a", adapter="a"),
    "embeds": Variant(embeds=EMBEDS),
    "one other embed": Variant(embeds=NEARLY),
    "embeds, salt x": Variant(embeds=EMBEDS, salt="x"),
    "tokens that stand in for embeds": Variant([0] * LENGTH),
}
BLOCKS = 160
HIT = (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token is always computed


@dataclass
class Found:
    """Both rounds of an arm by variant: completions, and cached tokens of the prompts."""

    completions: list[dict[str, Completion]]
    cached: list[dict[str, int]]
    hits: int
    ula: dict[str, float]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two LoRA adapters of the output projections: the second layer's rows differ."""
    from vllm.lora.request import LoRARequest

    requests = {}
    for number, name in enumerate("ab", start=1):
        directory: Path = tmp_path_factory.mktemp(f"adapter-{name}")
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(2):
            module = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
            for half, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK))):
                weight = torch.randn(shape, generator=generator) * 0.3
                tensors[f"{module}.lora_{half}.weight"] = weight
        save_file(tensors, directory / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"]}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        requests[name] = LoRARequest(name, number, str(directory))
    return requests


def send_twice(model: str, adapters: dict[str, Any], ula: dict[str, Any] | None) -> Found:
    """Both rounds, the second in another order."""
    from vllm import SamplingParams

    arguments: dict[str, Any] = {
        "num_gpu_blocks_override": BLOCKS,
        "enable_prompt_embeds": True,
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": RANK,
        "lora_target_modules": ["o_proj"],
    }
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    rounds: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    with engine(model, ula, **arguments) as llm:
        for names in (list(VARIANTS), list(VARIANTS)[::-1]):
            outputs = llm.generate(
                [VARIANTS[name].prompt for name in names],
                sampling,
                lora_request=[adapters.get(VARIANTS[name].adapter) for name in names],
                use_tqdm=False,
            )
            completions = [completion_of(sample) for o in outputs for sample in o.outputs]
            rounds[0].append(dict(zip(names, completions, strict=True)))
            rounds[1].append({n: o.num_cached_tokens for n, o in zip(names, outputs, strict=True)})
        return Found(*rounds, prefix_hits(llm), metrics(llm))


@pytest.fixture(scope="module")
def without(dense: str, adapters: dict[str, Any]) -> Found:
    """Both rounds without UlaCache."""
    return send_twice(dense, adapters, None)


@pytest.fixture(scope="module")
def with_ula(dense: str, adapters: dict[str, Any], without: Found) -> Found:
    """Both rounds with as few device rows as a decode step needs."""
    return send_twice(dense, adapters, {"device_slots": 80, "host_gib": 0.02})


@pytest.mark.parametrize("name", VARIANTS)
def test_hits_are_its_own(name: str, with_ula: Found) -> None:
    assert [cached[name] for cached in with_ula.cached] == [0, HIT]


def test_hits_are_counted(with_ula: Found, without: Found) -> None:
    """None is negative, and none is missing."""
    assert with_ula.cached == without.cached
    assert with_ula.hits == without.hits == len(VARIANTS) * HIT
    assert with_ula.ula["fetched_rows"] > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_same_tokens(name: str, with_ula: Found, without: Found) -> None:
    for found, expected in zip(with_ula.completions, without.completions, strict=True):
        assert_same([found[name]], [expected[name]])


def test_another_variants_rows_would_show(without: Found) -> None:
    """Control: what is computed differs wherever more than the salt does."""
    unsalted = [name for name, variant in VARIANTS.items() if variant.salt is None]
    computed = {tuple(without.completions[0][name].logprobs) for name in unsalted}
    assert len(computed) == len(unsalted)
