"""Device and host bytes of a GPU: as given, or what card, weights and reserve leave."""

from __future__ import annotations

from vllm_ula.capacity import GIB, Machine, Parallel
from vllm_ula.errors import ConfigError
from vllm_ula.plan.assumptions import Assumptions
from vllm_ula.plan.hardware import Card
from vllm_ula.plan.models import ModelConfig
from vllm_ula.plan.options import Options
from vllm_ula.plan.rows import Tokens
from vllm_ula.plan.weights import weights_of


def machine_of(
    options: Options, card: Card, config: ModelConfig, tokens: Tokens, notes: Assumptions
) -> Machine:
    """Ranks and their budgets; a layout whose weights do not fit has 0 device bytes.

    Raises:
        ConfigError: neither layout leaves device memory, or the card's memory is not known.
    """
    ranks = int(notes.or_default("gpus", _text(options.gpus)))
    host = options.host_bytes_per_gpu
    if host is None:
        given = notes.or_default("host_gib_per_gpu", _text(options.host_gib_per_gpu))
        host = int(float(given) * GIB)
    name = f"{ranks}x{card.name.upper()}"
    given_device = options.kv_bytes_per_gpu
    if options.kv_gib_per_gpu is not None:
        given_device = int(options.kv_gib_per_gpu * GIB)
    if given_device is not None:
        return Machine(name, ranks, given_device, given_device, host)
    device = _derived(options, card, config, tokens, ranks, notes)
    return Machine(name, ranks, device[Parallel.DP], device[Parallel.TP], host)


def _derived(
    options: Options,
    card: Card,
    config: ModelConfig,
    tokens: Tokens,
    ranks: int,
    notes: Assumptions,
) -> dict[Parallel, int]:
    if not card.memory_bytes:
        raise ConfigError("--gpu", card.name, "has no memory that is known", "--kv-gib-per-gpu")
    fraction = float(notes.or_default("memory_fraction", _text(options.memory_fraction)))
    reserve = float(notes.or_default("activation_gib", _text(options.activation_gib)))
    if options.weights_gib is not None:
        weights = dict.fromkeys(Parallel, int(options.weights_gib * GIB))
    else:
        counted = weights_of(config, tokens.mtp_layers)
        weights = {parallel: counted.of_rank(parallel, ranks) for parallel in Parallel}
        sizes = " or ".join(f"{weights[p] / GIB:,.1f} ({p.value.upper()})" for p in Parallel)
        why = (
            f"{counted.parameters / 1e9:,.1f} billion parameters counted from the config, "
            f"{counted.element_bytes} bytes each, embeddings 2; routed experts over all GPUs, "
            "the rest on each (DP) or divided (TP)"
        )
        notes.take("weights_gib", sizes, why)
    notes.take("card's memory", f"{card.memory_bytes / GIB:,.1f} GiB", card.source)
    left = {
        parallel: int(card.memory_bytes * fraction) - weights[parallel] - int(reserve * GIB)
        for parallel in Parallel
    }
    if max(left.values()) <= 0:
        least = min(weights.values())
        raise ConfigError(
            "--gpus",
            ranks,
            f"{least / GIB:,.1f} GiB of weights a GPU and {reserve:g} GiB of reserve leave nothing "
            f"of {fraction:g} x {card.memory_bytes / GIB:,.1f} GiB",
            "more or larger GPUs",
        )
    return {parallel: max(bytes_left, 0) for parallel, bytes_left in left.items()}


def _text(value: float | None) -> str | None:
    return None if value is None else repr(value)
