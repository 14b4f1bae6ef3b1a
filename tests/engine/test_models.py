"""DSA models on a CPU without UlaCache equal independent references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.harness import Request, assert_same, engine, prompts, run
from engine.workload import BLOCKS, POOLS, REQUESTS

pytestmark = pytest.mark.engine

SHORT, LONG = prompts([120])[0], prompts([700], seed=3)[0]


def prompt_logprobs(llm: Any, prompt: list[int]) -> torch.Tensor:
    """Logprob of each prompt token but the first, float64 `[n - 1]`."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    entries = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([entry[token].logprob for token, entry in entries], dtype=torch.float64)


@pytest.fixture(scope="module")
def found(tiny: str) -> dict[str, torch.Tensor]:
    """Prompt logprobs of a short and a long prompt in vLLM, in chunks of 256 tokens."""
    with engine(tiny, enable_prefix_caching=False) as llm:
        return {name: prompt_logprobs(llm, p) for name, p in (("short", SHORT), ("long", LONG))}
