"""Tiny checkpoints for the references, and a text to run through them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_ula.tiny_model import IndexShare, TinyModelOptions, write_tiny_model

OPTIONS = {
    "own indexers": TinyModelOptions(),
    "shared": TinyModelOptions(index_share=IndexShare(freq=4, offset=3), seed=1),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small run faster on one thread, several times on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=OPTIONS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory, OPTIONS[request.param])
    return directory


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """Byte tokens of a text that does not repeat."""
    return list(" ".join(f"{i * i % 977} rows, {i} tokens." for i in range(60)).encode())[:600]
