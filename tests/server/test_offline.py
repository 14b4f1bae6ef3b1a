"""`LLM.generate` as a script runs it: the engine core in its own process."""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server.harness import Finished, environment, finish

pytestmark = pytest.mark.server

# The engine's process imports the script again, hence the guard.
SCRIPT = """\
import json
import sys

from vllm import LLM, SamplingParams

import vllm_ula


def main():
    arguments, settings, prompts = json.loads(sys.argv[1])
    if settings is not None:
        arguments["kv_transfer_config"] = vllm_ula.kv_transfer_config(**settings)
    llm = LLM(**arguments)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
        use_tqdm=False,
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    counters = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:ula_fetched")}
    print("\\nRESULT", json.dumps([tokens, counters]))


if __name__ == "__main__":
    main()
"""
UNTIL_S = 200.0
# One request at a time: then no timing decides what is computed together.
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 65,
    "disable_log_stats": False,
}
ULA = {"device_slots": 144, "host_gib": 0.01}  # D_min, and what the history needs beyond it


def result(finished: Finished) -> tuple[list[list[int]], dict[str, int]]:
    """Tokens of each request, and the counters of fetched rows."""
    assert finished.status == 0, finished.stderr[-4000:]
    assert finished.processes == []
    assert "(EngineCore pid=" in finished.stdout
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    tokens, counters = json.loads(line.removeprefix("RESULT "))
    return tokens, counters


def test_generate_gives_the_same_tokens_as_without(models: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text(SCRIPT)
    rng = random.Random(7)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (500, 300, 700)]

    def generate(settings: dict[str, Any] | None) -> Finished:
        work = json.dumps([{"model": models["tiny"], **ARGUMENTS}, settings, prompts])
        return finish([sys.executable, str(script), work], environment(), UNTIL_S)

    with ThreadPoolExecutor(2) as pool:
        with_ula, without = pool.map(generate, (ULA, None))
    tokens, counters = result(with_ula)
    expected, none = result(without)
    assert [len(t) for t in expected] == [16] * 3
    assert tokens == expected
    assert not none
    assert counters["vllm:ula_fetched_rows"] > 0
    assert "UlaCache: 1040 logical slots = 144 device rows + 896 host rows" in with_ula.stdout
