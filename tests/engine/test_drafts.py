"""Speculative decoding: 1 to 4 drafts by n-gram and by MTP change nothing but the speed.

The matrix covers n-gram with 3 drafts and MTP with 1 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine.harness import (
    Completion,
    assert_same,
    at_rest,
    drafting,
    engine,
    in_children,
    metrics,
    run,
    spec_decode,
)
from matrix.cells import workload

from vllm_ula.capacity import min_device_slots

pytestmark = pytest.mark.engine

DRAFTS = {
    "n-gram 1": drafting("ngram", 1),
    "n-gram 4": drafting("ngram", 4),
    "MTP 2": drafting("mtp", 2),
    "MTP 4": drafting("mtp", 4),
}


@dataclass(frozen=True)
class Ran:
    """What one arm did; metrics, and the leases seen after each step, of UlaCache alone."""

    completions: list[Completion]
    drafts: tuple[int, int]
    values: dict[str, float]
    leases: list[float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny checkpoint with an MTP layer."""
    from vllm_ula.tiny_model import TinyModelOptions, write_tiny_model

    directory: Path = tmp_path_factory.mktemp("mtp")
    write_tiny_model(directory, TinyModelOptions(mtp=1))
    return str(directory)


def play(model: str, drafts: dict[str, Any], ula: bool) -> Ran:
    """Run the matrix's workload; the device pool holds one decode step."""
    num = drafts["num_speculative_tokens"]
    pool = {"device_slots": min_device_slots(128, 8 * (1 + num), 16), "host_gib": 0.05}
    leases: list[float] = []
    with engine(
        model,
        pool if ula else None,
        max_model_len=480,
        num_gpu_blocks_override=96,
        max_num_batched_tokens=128,
        speculative_config=drafts,
    ) as llm:
        at_step = (lambda _: leases.append(metrics(llm).get("leases", 0))) if ula else None
        completions = run(llm, workload(), at_step)
        return Ran(completions, spec_decode(llm), at_rest(llm) if ula else {}, leases)


@pytest.mark.parametrize("name", DRAFTS)
def test_same_tokens_and_the_same_drafts_accepted(model: str, name: str) -> None:
    drafts = DRAFTS[name]
    expected, found = in_children(play, [(model, drafts, False), (model, drafts, True)])
    assert_same(found.completions, expected.completions)
    assert found.drafts == expected.drafts
    accepted, rejected = found.drafts
    assert accepted > 0
    assert rejected > 0
    if name.startswith("MTP"):
        assert 0.2 <= accepted / (accepted + rejected) <= 0.8
    assert max(found.leases) >= drafts["num_speculative_tokens"]
    # Drafts are rows of their step like any other; what does not fit beside them is read in place.
    assert found.values["read_in_place_rows.host"] > 0
    assert found.values["fetched_rows"] > 0
