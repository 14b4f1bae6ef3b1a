"""DSA models on a CPU without UlaCache equal independent references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine.harness import assert_same, engine, prompts, run
from engine.workload import BLOCKS, POOLS, REQUESTS
from reference import brute_force, hf_reference

from vllm_ula.attention.impl import UlaSparseMlaImpl

pytestmark = pytest.mark.engine

SHORT, LONG = prompts([120])[0], prompts([600], seed=3)[0]  # index_topk is 128


@dataclass
class Found:
    """What vLLM computes for a prompt.

    Attributes:
        logprobs: of each prompt token but the first, float32 `[T - 1]`.
        selections: `[T, topk]` positions of each layer.
    """

    logprobs: torch.Tensor
    selections: list[torch.Tensor]


def prefill(llm: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Found:
    """Prefill a prompt in chunks, keeping what each layer selected."""
    from vllm import SamplingParams

    calls: list[torch.Tensor] = []
    forward = UlaSparseMlaImpl.forward_mqa

    def keeping(self: Any, q: Any, *args: Any) -> Any:
        calls.append(self.topk[: len(q[0])].long())
        return forward(self, q, *args)

    monkeypatch.setattr(UlaSparseMlaImpl, "forward_mqa", keeping)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    monkeypatch.undo()
    entries = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return Found(
        logprobs=torch.tensor([entry[token].logprob for token, entry in entries]),
        selections=[torch.cat(calls[layer::4]) for layer in range(4)],
    )


@pytest.fixture(scope="module")
def found(tiny: str) -> dict[str, Found]:
    """Both prompts, prefilled in chunks of 256 tokens."""
    with pytest.MonkeyPatch.context() as patch, engine(tiny, enable_prefix_caching=False) as llm:
        return {"short": prefill(llm, SHORT, patch), "long": prefill(llm, LONG, patch)}


def overlap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of the positions selected by `a` that `b` selects too; both `[T, topk]`, -1 padded."""
    hit = ((a.unsqueeze(2) == b.unsqueeze(1)) & (a >= 0).unsqueeze(2)).any(2)
    return float(hit.sum() / (a >= 0).sum())


def test_prompt_logprobs_equal_transformers(tiny: str, found: dict[str, Found]) -> None:
    expected = hf_reference.Model(tiny).prompt_logprobs(SHORT)
    torch.testing.assert_close(found["short"].logprobs, expected, rtol=0, atol=1e-4)


def test_selections_equal_an_fp8_indexer(tiny: str, found: dict[str, Found]) -> None:
    """Above index_topk, for the hidden states vLLM's own selections lead to."""
    chosen = found["long"].selections
    seen = brute_force.Model(tiny).forward(LONG, selections=chosen).indexer_inputs
    reference = hf_reference.Model(tiny, fp8_indexer=True)
    for layer, selection in enumerate(chosen):
        assert overlap(selection, reference.select(layer, seen[layer])) >= 0.99


def test_attention_over_a_long_prompt_equals_brute_force(
    tiny: str, found: dict[str, Found]
) -> None:
    """Contiguous history, full scores, torch.topk; logprobs for vLLM's selections."""
    model = brute_force.Model(tiny)
    forced = model.forward(LONG, selections=found["long"].selections)
    expected = brute_force.next_token_logprobs(forced.logits, LONG)
    torch.testing.assert_close(found["long"].logprobs, expected, rtol=0, atol=1e-4)

    for layer, selection in enumerate(found["long"].selections):
        assert overlap(selection, model.select(layer, forced.indexer_inputs[layer])) >= 0.99


def test_a_shifted_selection_goes_red(tiny: str, found: dict[str, Found]) -> None:
    """Control: the references see one wrong row per token."""
    wrong = [selection.clone() for selection in found["long"].selections]
    wrong[1][300:, 5] = (wrong[1][300:, 5] + 16).remainder(300)
    forced = brute_force.Model(tiny).forward(LONG, selections=wrong)
    expected = brute_force.next_token_logprobs(forced.logits, LONG)
    assert (found["long"].logprobs - expected).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_row_types_equal_the_same_without_ula(tiny: str, dtype: str) -> None:
    arguments: dict[str, Any] = {"dtype": dtype, "num_gpu_blocks_override": BLOCKS}
    with engine(tiny, **arguments) as llm:
        expected = run(llm, REQUESTS[:5])
    with engine(tiny, POOLS["minimum"], **arguments) as llm:
        assert_same(run(llm, REQUESTS[:5]), expected)


def test_compiled_graphs_give_the_same_tokens(
    tiny: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --enforce-eager: vLLM traces the model around our operations."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # trace with Dynamo, run without Inductor
    with engine(tiny, POOLS["eighth"], num_gpu_blocks_override=BLOCKS, enforce_eager=False) as llm:
        assert_same(run(llm, REQUESTS), expected)
