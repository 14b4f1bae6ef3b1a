"""What was not given, and what was taken instead: printed with every figure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumption:
    """One default that was used.

    Attributes:
        name: of an option, or of a rule.
        value: what was taken.
        why: where it comes from.
    """

    name: str
    value: str
    why: str


# Options that have the same default for every model and card.
DEFAULTS: dict[str, tuple[str, str]] = {
    "gpu": ("h200", "one of the cards of the published comparison"),
    "gpus": ("8", "one node"),
    "host_gib_per_gpu": ("0", "no host memory was given: UlaCache is a device-only cache"),
    "parallel": ("dp", "what this version serves: each GPU attends for requests of its own"),
    "context": ("64k..128k", "prompts of the published workload; k is 1,024 tokens"),
    "output": ("2048", "tokens generated per request in the published workload"),
    "spec_tokens": ("0", "no drafts, so no MTP layer has rows or index keys"),
    "hot_rows": ("4096", "device rows a request of the HiSparse systems; theirs was published so"),
    "memory_fraction": ("0.92", "vLLM's default --gpu-memory-utilization"),
    "activation_gib": (
        "8",
        "activations, graphs and communication buffers: a guess; vLLM's log says what is left "
        "for KV, which --kv-gib-per-gpu takes",
    ),
    "hit_rate": (
        "0.866",
        "HiSparse paper, exact LRU over 4,096 rows a request misses 13.4 %; UlaCache's rate on a "
        "GPU has not been measured",
    ),
}


class Assumptions:
    """Collects defaults in the order in which they are taken, each once."""

    def __init__(self) -> None:
        self.taken: list[Assumption] = []

    def take(self, name: str, value: object, why: str) -> None:
        """Note a default."""
        assumption = Assumption(name, str(value), why)
        if assumption not in self.taken:
            self.taken.append(assumption)

    def or_default(self, name: str, given: str | None) -> str:
        """What was given for an option of `DEFAULTS`, or its default, which is noted."""
        if given is not None:
            return given
        value, why = DEFAULTS[name]
        self.take(name, value, why)
        return value
