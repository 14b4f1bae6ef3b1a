"""The cells of the matrix: what vLLM can be asked to do, and what the rows can be like.

Both arms of a cell run the same requests under the same schedule; UlaCache must change neither a
token nor a logprob nor which drafts are accepted.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from engine.harness import (
    Completion,
    Request,
    assert_same,
    at_rest,
    drafting,
    engine,
    in_children,
    run,
    spec_decode,
    worker,
)

AXES: dict[str, tuple[str, ...]] = {
    "prefix_cache": ("on", "off"),
    "chunked_prefill": ("on", "off"),
    "drafts": ("none", "n-gram", "MTP 1", "MTP 3"),
    "rows": ("fp32", "bf16", "fp8_ds_mla"),
    "index_share": ("one group", "three groups"),
    "device_pool": ("1/2", "D_min"),
}
ROW_TYPES = {"fp32": "auto", "bf16": "bfloat16", "fp8_ds_mla": "fp8_ds_mla"}
DRAFTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "n-gram": drafting("ngram", 3),
    "MTP 1": drafting("mtp", 1),
    "MTP 3": drafting("mtp", 3),
}
SHARES = {"one group": (4, 1), "three groups": (4, 3)}  # index_topk_freq, its offset

TOPK = 64
MAX_LEN, BLOCKS = 256, 48  # of 16 tokens: about three requests of the longest kind
LENGTHS = (40, 90, 130, 170, 225)
OUTPUT = 14
HALF = 384  # device rows: half of the logical slots
D_MIN = 96  # one selection, and 8 requests of at most 1 + 3 tokens


@dataclass(frozen=True)
class Cell:
    """One value of each axis."""

    prefix_cache: str
    chunked_prefill: str
    drafts: str
    rows: str
    index_share: str
    device_pool: str

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={v}" for f, v in zip(fields(self), astuple(self), strict=True))


ALL = [Cell(*values) for values in product(*AXES.values())]


def pairwise() -> list[Cell]:
    """Cells in which every pair of values of two axes occurs, chosen greedily."""

    def pairs(cell: Cell) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(astuple(cell)), 2))

    missing = set().union(*map(pairs, ALL))
    chosen = []
    while missing:
        best = max(ALL, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def workload(seed: int = 7) -> list[Request]:
    """Two waves of requests: text the model likes to continue among random bytes, then again.

    The second wave repeats the first, so that prefixes are hit; half of the requests sample.
    """
    rng = random.Random(seed)
    prompts = []
    for length in LENGTHS:
        runs: list[int] = []
        while len(runs) < length:
            start = rng.randrange(len(string.ascii_lowercase))
            runs += [*(string.ascii_lowercase * 2)[start : start + 20].encode()]
            runs += [rng.randrange(256) for _ in range(10)]
        prompts.append(runs[:length])
    return [
        Request(prompt, OUTPUT, arrives=wave * 30 + i, seed=i if (i + wave) % 2 else None)
        for wave in range(2)
        for i, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class Ran:
    """What one arm did.

    Attributes:
        completions: tokens and logprobs.
        drafts: accepted and rejected ones.
        fetched: rows, of UlaCache alone.
    """

    completions: list[Completion]
    drafts: tuple[int, int]
    fetched: int = 0


def write_models(directory: Path) -> None:
    """A checkpoint with an MTP layer for each way to share selections."""
    from vllm_ula.tiny_model import IndexShare, TinyModelOptions, write_tiny_model

    for name, share in SHARES.items():
        options = TinyModelOptions(topk=TOPK, mtp=1, index_share=IndexShare(*share))
        write_tiny_model(directory / name.replace(" ", "-"), options)


def run_arm(models: Path, cell: Cell, ula: bool) -> Ran:
    """Run the workload in one arm of a cell."""
    settings = {"device_slots": HALF if cell.device_pool == "1/2" else D_MIN, "host_gib": 0.05}
    chunked = cell.chunked_prefill == "on"
    with engine(
        str(models / cell.index_share.replace(" ", "-")),
        settings if ula else None,
        max_model_len=MAX_LEN,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=cell.prefix_cache == "on",
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=64 if chunked else MAX_LEN,
        kv_cache_dtype=ROW_TYPES[cell.rows],
        speculative_config=DRAFTS[cell.drafts],
    ) as llm:
        completions = run(llm, workload())
        drafts = spec_decode(llm)
        if not ula:
            return Ran(completions, drafts)
        groups = {"one group": 1, "three groups": 3}[cell.index_share]
        assert len(worker().domains) == groups + cell.drafts.startswith("MTP")
        return Ran(completions, drafts, fetched=int(at_rest(llm)["fetched_rows"]))


def assert_equal(found: Ran, expected: Ran) -> None:
    """Tokens, logprobs and drafts are identical."""
    assert_same(found.completions, expected.completions)
    assert found.drafts == expected.drafts, "drafts differ"


def off_cell(cell: Cell) -> Cell:
    """The cell whose arm without UlaCache is that of `cell`: it knows no device pool."""
    return replace(cell, device_pool=AXES["device_pool"][0])


def run_arms(models: Path, cells: Iterable[Cell]) -> Iterator[tuple[Cell, bool, Ran | str]]:
    """Both arms of every cell, each in a process of its own, the arms without UlaCache first.

    Yields:
        The cell, whether UlaCache was in, and what it did or the message it was refused with.
    """
    cells = list(cells)
    arms = [(cell, False) for cell in dict.fromkeys(map(off_cell, cells))]
    arms += [(cell, True) for cell in cells]
    ran = in_children(_run_or_refuse, [(models, cell, ula) for cell, ula in arms])
    for (cell, ula), result in zip(arms, ran, strict=True):
        yield cell, ula, result


def _run_or_refuse(models: Path, cell: Cell, ula: bool) -> Ran | str:
    try:
        return run_arm(models, cell, ula)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
