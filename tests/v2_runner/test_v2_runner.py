"""vLLM's V2 model runner, the connector and our kernels together, in Triton's interpreter.

This is what a GPU runs, but for streams, graphs and speed. Every arm is a process of its own:
Triton and the runner are chosen when vLLM is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from v2_runner.runner_arm import ROWS

from vllm_ula.kernels import dispatch
from vllm_ula.tiny_model import TinyModelOptions, write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.parametrize("rows", ROWS)]

ROOT = Path(__file__).parents[2]
ARMS = {"v1": ("v1", "auto"), "torch": ("v2", "torch"), "triton": ("v2", "triton")}
# Attention and scores whose results vary by a relative 1e-6 move logprobs by 5e-6; rows that keep
# fp8 by 3e-4, where a value falls on the other side of a rounding. The control moves them by 0.3.
LOGPROB_TOLERANCE = {"auto": 1e-4, "fp8_ds_mla": 1e-2}

Arm = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Arm:
    """What an arm found, by type of rows; its process runs when it is first asked for."""
    directory = tmp_path_factory.mktemp("v2")
    model = directory / "model"
    write_tiny_model(model, TinyModelOptions(layers=2, topk=64))
    found: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in found:
            runner, kernels = ARMS[name]
            result = directory / f"{name}.json"
            command = [
                sys.executable,
                "-m",
                "v2_runner.runner_arm",
                runner,
                str(model),
                str(result),
            ]
            path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
            environment = {**os.environ, "VLLM_ULA_KERNELS": kernels, "PYTHONPATH": path}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
            found[name] = json.loads(result.read_text())
        return found[name]

    return run


def assert_same(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float
) -> None:
    """The same tokens, by logprobs that differ by rounding only."""
    for a, b in zip(found, expected, strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["logprobs"] == pytest.approx(b["logprobs"], rel=0, abs=tolerance)


def test_v2_runner_gives_the_tokens_of_v1(arm: Arm, rows: str) -> None:
    found, expected = arm("torch")[rows], arm("v1")[rows]
    assert_same(found["requests"], expected["requests"], LOGPROB_TOLERANCE[rows])


def test_an_exchange_that_moves_nothing_is_noticed(arm: Arm, rows: str) -> None:
    """Control, by logprobs alone too: of each request."""
    found = arm("v1")[rows]
    for a, b in zip(found["control"], found["requests"], strict=True):
        with pytest.raises(AssertionError):
            assert_same([a], [{**b, "tokens": a["tokens"]}], LOGPROB_TOLERANCE[rows])


def test_triton_kernels_give_the_tokens_of_their_references(arm: Arm, rows: str) -> None:
    found, expected = arm("triton")[rows], arm("torch")[rows]
    assert_same(found["requests"], expected["requests"], LOGPROB_TOLERANCE[rows])


@pytest.mark.parametrize("name", ARMS)
def test_the_workload_needs_every_way_to_a_row(arm: Arm, rows: str, name: str) -> None:
    """Hits, exchanges with live victims, prefill in place in both tiers, a cached prefix."""
    metrics = arm(name)[rows]["metrics"]
    ways = ["device_hits", "fetched_rows", "written_back_rows", "exchanges"]
    ways += ["read_in_place_rows.device", "read_in_place_rows.host"]
    assert [way for way in ways if not metrics[way]] == []
    assert arm(name)[rows]["prefix_hits"] >= 128


def test_every_operation_runs_as_triton_and_no_reference_does(arm: Arm, rows: str) -> None:
    calls = {(name, used) for name, used in arm("triton")[rows]["calls"]}
    assert calls == {(name, "triton") for name in dispatch.references}


def test_where_torch_is_asked_for_nothing_runs_as_triton(arm: Arm, rows: str) -> None:
    """Planning is compiled for the CPU there, without operations."""
    calls = {(name, used) for name, used in arm("torch")[rows]["calls"]}
    assert {used for _, used in calls} == {"torch"}
    assert {"scatter", "sparse_mla", "topk"} <= {name for name, _ in calls}
