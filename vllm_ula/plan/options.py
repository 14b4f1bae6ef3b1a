"""What was asked for, checked before anything is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from vllm_ula.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """The options of `vllm-ula plan`; None was not given.

    Attributes:
        model: name, directory or config.json.
        gpu: name of a card.
        gpus: P.
        kv_gib_per_gpu: device memory for KV of a GPU, M; or
        kv_bytes_per_gpu: the same in bytes.
        host_gib_per_gpu: host memory of a GPU, C; or
        host_bytes_per_gpu: the same in bytes.
        dp: report DP attention.
        tp: report TP attention.
        context: prompts, see `context.py`.
        output: tokens generated per request.
        kv_dtype: how rows are kept.
        spec_tokens: drafts a step.
        hot_rows: B of the HiSparse systems.
        block_size: tokens of a block.
        max_num_seqs: requests a decode step may have.
        device_slots: fixes the device rows D of UlaCache.
        memory_fraction: of the card that the engine takes.
        activation_gib: of that, neither weights nor KV.
        weights_gib: weights on each GPU, instead of counting them.
        hit_rate: selected rows served from the device without a copy, 0..1.
        bare: formulas alone: no maps, whole blocks or null block.
        json: print JSON.
        plot: PNG to write.
    """

    model: str
    gpu: str | None = None
    gpus: int | None = None
    kv_gib_per_gpu: float | None = None
    kv_bytes_per_gpu: int | None = None
    host_gib_per_gpu: float | None = None
    host_bytes_per_gpu: int | None = None
    dp: bool = False
    tp: bool = False
    context: str | None = None
    output: int | None = None
    kv_dtype: str | None = None
    spec_tokens: int | None = None
    hot_rows: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    device_slots: int | None = None
    memory_fraction: float | None = None
    activation_gib: float | None = None
    weights_gib: float | None = None
    hit_rate: float | None = None
    bare: bool = False
    json: bool = False
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise ConfigError(flag(name), value, f"must be >= {least}", max(least, 1))
        for name, most in (("memory_fraction", 1), ("hit_rate", 1), ("gpus", 2**20)):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigError(flag(name), value, f"must be <= {most}", most)
        if self.plot is not None and self.plot.suffix != ".png":
            raise ConfigError("--plot", self.plot, "must name a .png", "plan.png")
        for first, second in _CONTRADICT:
            if getattr(self, first) not in (None, False) and getattr(self, second) not in (
                None,
                False,
            ):
                rule = f"says what {flag(second)} says too"
                raise ConfigError(flag(first), getattr(self, first), rule, "one of the two")


def flag(name: str) -> str:
    """An option as it is written."""
    return "--" + name.replace("_", "-")


_LEAST: dict[str, float] = {
    "gpus": 1,
    "kv_gib_per_gpu": 0,
    "kv_bytes_per_gpu": 0,
    "host_gib_per_gpu": 0,
    "host_bytes_per_gpu": 0,
    "output": 0,
    "spec_tokens": 0,
    "hot_rows": 1,
    "block_size": 1,
    "max_num_seqs": 1,
    "device_slots": 1,
    "memory_fraction": 0,
    "activation_gib": 0,
    "weights_gib": 0,
    "hit_rate": 0,
}
_DERIVED = ("memory_fraction", "activation_gib", "weights_gib")
_CONTRADICT = (
    ("kv_gib_per_gpu", "kv_bytes_per_gpu"),
    ("host_gib_per_gpu", "host_bytes_per_gpu"),
    ("dp", "tp"),
    ("bare", "device_slots"),
    ("bare", "block_size"),
    *((given, name) for given in ("kv_gib_per_gpu", "kv_bytes_per_gpu") for name in _DERIVED),
)
assert {*_LEAST} <= {field.name for field in fields(Options)}
