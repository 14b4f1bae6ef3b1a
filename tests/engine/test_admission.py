"""Admission by logical capacity: what starts can serve its longest request, to the last block."""

from __future__ import annotations

from typing import Any

import pytest
from engine.harness import Request, drafting, engine, in_children, prompts, run, scheduler
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.engine

# 20 logical blocks of 16 tokens, one of which is vLLM's null block: 304 tokens.
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 128}
POOL = {"device_slots": 176, "host_gib": 0.05}


def test_a_length_that_would_wait_for_ever_is_refused(tiny: str) -> None:
    """By vLLM's own check at start, which counts logical blocks."""
    with (
        pytest.raises(ValueError, match=r"max seq len \(320\).* maximum model length is 304"),
        engine(tiny, POOL, max_model_len=320, **ROOM),
    ):
        pass


def test_the_longest_request_vllm_chose_runs_alone(tiny: str) -> None:
    """`--max-model-len auto`; beside it 8 short ones wait, none fails."""
    assert list(in_children(serve_the_longest, [(tiny,)])) == [None]


def serve_the_longest(tiny: str) -> None:
    """The story of the test, in a process of its own."""
    drafts = drafting("ngram", 4)
    with engine(tiny, POOL, max_model_len=-1, speculative_config=drafts, **ROOM) as llm:
        assert llm.llm_engine.model_config.max_model_len == 304
        assert scheduler(llm).max_model_len == 304
        longest = Request([*range(97, 123)] * 11 + [*range(97, 105)], 10)  # 294 and 10
        others = [Request(prompt, 5, arrives=1) for prompt in prompts([60] * 8)]
        done = run(llm, [longest, *others])
        assert [len(completion.tokens) for completion in done] == [10] + [5] * 8
        assert {completion.finish_reason for completion in done} == {"length"}

        with pytest.raises(VLLMValidationError, match="maximum context length is 304 tokens"):
            run(llm, [Request(prompts([305])[0], 1)])
