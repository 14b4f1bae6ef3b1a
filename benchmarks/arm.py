"""One engine in a process of its own, driven over a pipe, so that two arms can take turns.

parent -> {"prompts": [[...]], "max_tokens": n}
child  <- Sample as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Sample:
    """One batch of requests, all submitted at once.

    Attributes:
        seconds: from the first step to the last.
        decode_seconds: of the steps after every request had its first token.
        decode_tokens: tokens sampled in those steps.
        max_running: requests running at once, at most.
        preempted: requests preempted.
        tokens: sampled tokens, request by request.
        plan_seconds: UlaCache planned in `decode_seconds`; 0 without it.
    """

    seconds: float
    decode_seconds: float
    decode_tokens: int
    max_running: int
    preempted: int
    tokens: list[list[int]]
    plan_seconds: float


class Arm:
    """A child process with one engine.

    Args:
        arguments: of `vllm.LLM`; `ula` among them holds UlaCache's settings, None leaves it out.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.arm", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        self.start = self._read()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.pid

    def run(self, prompts: list[list[int]], max_tokens: int) -> Sample:
        """Generate `max_tokens` greedy tokens for every prompt."""
        assert self._child.stdin is not None
        print(
            json.dumps({"prompts": prompts, "max_tokens": max_tokens}),
            file=self._child.stdin,
            flush=True,
        )
        return Sample(**self._read())

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"the engine ended with exit code {self._child.wait()}")


def _batch(llm: Any, prompts: list[list[int]], max_tokens: int) -> Sample:
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    preempted = 0
    preempt = scheduler._preempt_request

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counting
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
    tokens: dict[str, list[int]] = {}
    start = time.perf_counter()
    decode_start, sampled, max_running, planned = None, 0, 0, 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        max_running = max(max_running, len(scheduler.running))
        if decode_start is None and len(tokens) == len(prompts):
            planned = _plan_seconds(llm)
            decode_start, sampled = time.perf_counter(), sum(map(len, tokens.values()))
    end = time.perf_counter()
    scheduler._preempt_request = preempt
    total = sum(map(len, tokens.values()))
    return Sample(
        seconds=end - start,
        decode_seconds=end - (decode_start or end),
        decode_tokens=total - sampled,
        max_running=max_running,
        preempted=preempted,
        tokens=[tokens[str(i)] for i in range(len(prompts))],
        plan_seconds=_plan_seconds(llm) - planned,
    )


def _plan_seconds(llm: Any) -> float:
    """Seconds of planning so far."""
    return float(sum(m.sum for m in llm.get_metrics() if m.name == "vllm:ula_plan_seconds"))


def _serve(arguments: dict[str, Any]) -> None:
    import vllm
    from vllm import LLM

    import vllm_ula

    ula = arguments.pop("ula")
    if ula is not None:
        arguments["kv_transfer_config"] = vllm_ula.kv_transfer_config(**ula)
    llm = LLM(enforce_eager=True, disable_log_stats=False, **arguments)
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    print(json.dumps({"vllm": vllm.__version__, "blocks": blocks}), flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(_batch(llm, **json.loads(line)))), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
