"""Cards: memory and bandwidths, with sources."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ula.errors import ConfigError

MIB = 2**20


@dataclass(frozen=True)
class Card:
    """A device and what vLLM does on it.

    Attributes:
        name: as on the command line.
        memory_bytes: what its driver reports; 0 where KV memory must be given.
        hbm_gb_s: device memory, GB/s; 0 is unknown.
        nvlink_gb_s: to other GPUs, GB/s each way; 0 is none.
        host_gb_s: to host memory, GB/s each way.
        block_size: tokens of a block of the sparse index kernels.
        max_num_seqs: default of `vllm serve`.
        with_kernels: whether kernels plan, or what is compiled for a CPU.
        source: of the figures.
    """

    name: str
    memory_bytes: int
    hbm_gb_s: float
    nvlink_gb_s: float
    host_gb_s: float
    block_size: int
    max_num_seqs: int
    with_kernels: bool
    source: str


CARDS = {
    card.name: card
    for card in (
        Card(
            "h100", 81_559 * MIB, 3350, 450, 64, 64, 1024, True,
            "memory: nvidia-smi, 81,559 MiB; HBM3 3.35 TB/s, NVLink 4 900 GB/s both ways "
            "together, PCIe Gen5 x16 64 GB/s: NVIDIA's specification",
        ),
        Card(
            "h200", 143_771 * MIB, 4800, 450, 64, 64, 1024, True,
            "memory: nvidia-smi, 143,771 MiB; HBM3e 4.8 TB/s, NVLink 4 900 GB/s both ways "
            "together, PCIe Gen5 x16 64 GB/s: NVIDIA's specification",
        ),
        Card(
            "b300", 275_040 * MIB, 8000, 900, 128, 64, 1024, True,
            "memory: nvidia-smi, 275,040 MiB; HBM3e 8 TB/s, NVLink 5 1,800 GB/s both ways "
            "together: NVIDIA's specification; PCIe Gen6 x16 128 GB/s: its standard",
        ),
        Card(
            "cpu", 0, 0, 0, 0, 16, 128, False,
            "vLLM's CPU build: give its device memory with --kv-gib-per-gpu",
        ),
    )
}  # fmt: skip


def card(name: str) -> Card:
    """The card of that name.

    Raises:
        ConfigError: there is none.
    """
    found = CARDS.get(name.lower())
    if found is None:
        rule = "is no card with figures here"
        works = f"one of {', '.join(CARDS)}, with --kv-gib-per-gpu for another's memory"
        raise ConfigError("--gpu", name, rule, works)
    return found
