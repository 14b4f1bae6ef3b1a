"""The settings, in one frozen record; every check names key, value, rule and a value that works."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_ula.errors import ConfigError

PLANNERS = ("pb_lru", "timestamp_lru", "hash_lru")
MAX_BUCKETS = 4096  # what a bucket takes whatever the pool, 100 bytes, is not charged
BUCKET_AGES = ("admitted", "touched", "calls")
CHECK_VARIABLE = "VLLM_ULA_CHECK"
KERNELS_VARIABLE = "VLLM_ULA_KERNELS"
KERNELS = ("auto", "torch", "triton")


@dataclass(frozen=True)
class UlaConfig:
    """Settings of one engine, from `kv_connector_extra_config`.

    Attributes:
        host_gib: host memory for rows in GiB, over all ranks of a tensor-parallel group; 0 is a
            device-only cache.
        device_gib: at most this many GiB of device memory for KV; None takes what vLLM offers.
        device_slots: fixes the device rows of each layer instead (tests, experiments).
        planner: who gives up device rows: `pb_lru`, `timestamp_lru` (exact) or `hash_lru`.
        recency_buckets: buckets of `pb_lru`, the cold one included.
        bucket_age: what fills a bucket of `pb_lru`: rows `admitted` (given new bytes), rows
            `touched` (hits too), or one of the `calls`.
        hash_buckets: buckets of `hash_lru`, a power of two.
        record: directory, new or empty, that gets a trace of the run; None records nothing.
        record_gib: the trace never takes more GiB of disk; recording ends when it would.
    """

    host_gib: float = 0.0
    device_gib: float | None = None
    device_slots: int | None = None
    planner: str = "pb_lru"
    recency_buckets: int = 64
    bucket_age: str = "admitted"
    hash_buckets: int = 64
    record: str | None = None
    record_gib: float = 1.0

    def __post_init__(self) -> None:
        _number("host_gib", self.host_gib, "must be >= 0 GiB", self.host_gib_ok(), 4)
        if self.device_gib is not None:
            ok = _is_number(self.device_gib) and self.device_gib > 0
            _number("device_gib", self.device_gib, "must be > 0 GiB", ok, 1)
        if self.device_slots is not None:
            ok = _is_int(self.device_slots) and self.device_slots > 0
            _number("device_slots", self.device_slots, "must be a whole number > 0", ok, 4096)
            if self.device_gib is not None:
                raise ConfigError(
                    "device_slots",
                    self.device_slots,
                    f"fixes the device pool, which device_gib={self.device_gib} sizes too",
                    "one of the two",
                )
        _one_of("planner", self.planner, PLANNERS)
        _one_of("bucket_age", self.bucket_age, BUCKET_AGES)
        ok = _is_int(self.recency_buckets) and 2 <= self.recency_buckets <= MAX_BUCKETS
        _number(
            "recency_buckets",
            self.recency_buckets,
            f"must be a whole number 2..{MAX_BUCKETS}",
            ok,
            64,
        )
        buckets = self.hash_buckets
        ok = _is_int(buckets) and 1 <= buckets <= MAX_BUCKETS and buckets & (buckets - 1) == 0
        _number("hash_buckets", buckets, f"must be a power of two up to {MAX_BUCKETS}", ok, 64)
        if self.record is not None and not (isinstance(self.record, str) and self.record):
            raise ConfigError("record", self.record, "must be the path of a directory", "trace")
        ok = _is_number(self.record_gib) and self.record_gib > 0
        _number("record_gib", self.record_gib, "must be > 0 GiB", ok, 1)

    def host_gib_ok(self) -> bool:
        """Whether host_gib is a finite number >= 0."""
        return _is_number(self.host_gib) and self.host_gib >= 0

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> UlaConfig:
        """Read `kv_connector_extra_config`; unknown keys are refused.

        Raises:
            ConfigError: a key is unknown or its value breaks a rule.
        """
        known = [field.name for field in fields(cls)]
        for key, value in extra.items():
            if key not in known:
                raise ConfigError(key, value, "is no setting of ula", f"one of {', '.join(known)}")
        return cls(**extra)

    @property
    def host_bytes(self) -> int:
        """host_gib in bytes."""
        return int(self.host_gib * 2**30)


def check_record_directory(record: str) -> None:
    """Raise ConfigError unless `record` names a directory that is empty or can be made."""
    path = Path(record)
    if path.exists() and not path.is_dir():
        rule = "is a file"
    elif path.is_dir() and any(path.iterdir()):
        rule = "holds files, which a trace would mix with"
    else:
        return
    raise ConfigError("record", record, rule, "a new or an empty directory")


def check_every_step() -> bool:
    """Whether `VLLM_ULA_CHECK=1` asks for an integrity check after every step (slow).

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(CHECK_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ConfigError(CHECK_VARIABLE, value, "must be 0 or 1", "1")
    return value == "1"


def chosen_kernels(on_cpu: bool) -> str:
    """Whose kernels `VLLM_ULA_KERNELS` asks for: `auto`, `torch` or `triton`.

    Args:
        on_cpu: whether vLLM runs on a CPU, which has no Triton but its interpreter.

    Raises:
        ConfigError: the variable is none of them, or asks for what cannot run here.
    """
    value = os.environ.get(KERNELS_VARIABLE, KERNELS[0])
    _one_of(KERNELS_VARIABLE, value, KERNELS)
    if value == "triton" and on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            KERNELS_VARIABLE,
            value,
            "a CPU runs Triton kernels only in Triton's interpreter",
            "auto, or TRITON_INTERPRET=1 with it",
        )
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and abs(value) < float("inf"))


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(key, value, f"must be one of {', '.join(allowed)}", allowed[0])


def _number(key: str, value: object, rule: str, ok: bool, works: object) -> None:
    if not ok:
        raise ConfigError(key, value, rule, works)
