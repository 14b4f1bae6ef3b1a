"""One tiny checkpoint and one environment for all engine tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine.harness import Completion, engine, environment, run
from engine.workload import AGAIN, BLOCKS, REQUESTS


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    yield from environment()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of the tiny checkpoint."""
    from vllm_ula.tiny_model import write_tiny_model

    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return str(directory)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One of 2 layers without experts.

    On a CPU vLLM has no LoRA beside experts, and reloads them wrongly, as in vllm#42821.
    """
    from vllm_ula.tiny_model import TinyModelOptions, weights, write_tiny_model

    directory = tmp_path_factory.mktemp("dense")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "NUM_DENSE_LAYERS", 2)
        write_tiny_model(directory, TinyModelOptions(layers=2, topk=64))
    return str(directory)


@pytest.fixture(scope="session")
def without(tiny: str) -> tuple[list[Completion], list[Completion]]:
    """Completions without UlaCache: of the workload, then of the requests sent again."""
    with engine(tiny, num_gpu_blocks_override=BLOCKS) as llm:
        return run(llm, REQUESTS), run(llm, AGAIN)


@pytest.fixture(scope="session")
def expected(without: tuple[list[Completion], list[Completion]]) -> list[Completion]:
    """Completions of the workload without UlaCache."""
    return without[0]


@pytest.fixture(scope="session")
def expected_warm(without: tuple[list[Completion], list[Completion]]) -> list[Completion]:
    """Completions of `AGAIN` without UlaCache, after the workload."""
    return without[1]
