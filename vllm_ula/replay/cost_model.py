"""What a decode step spends on rows and index keys, by a model: nothing here is measured.

Only what the systems do differently is modelled. Weights, matrix products, the network between
ranks and the overlap of copies with them are the same for all or not known, and left out: these
are not step times, and their ratios are no speed-ups.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Rates of one rank.

    Attributes:
        name: of the accelerator.
        host_gb_s: copies between host and device, GB/s in each direction at once.
        device_gb_s: device memory, GB/s.
    """

    name: str
    host_gb_s: float
    device_gb_s: float


# PCIe Gen5 x16 moves 64 GB/s by its specification; 50 is a round figure for copies of rows, which
# are small. 4.8 TB/s is NVIDIA's figure for the H200.
H200_COST = CostModel("H200", host_gb_s=50, device_gb_s=4800)
# PCIe Gen6 x16 is 128 GB/s by its specification, taken at the same share; 8 TB/s is NVIDIA's.
B300_COST = CostModel("B300", host_gb_s=100, device_gb_s=8000)


@dataclass(frozen=True)
class ModelledStep:
    """Milliseconds of one decode step of one rank; from a cost model, not measured.

    Attributes:
        transfer_ms: fetched and written-back rows, the longer of the two directions.
        rows_ms: reading the selected rows.
        index_keys_ms: scoring all index keys.
    """

    transfer_ms: float
    rows_ms: float
    index_keys_ms: float


def step(
    cost: CostModel,
    fetched_bytes: float,
    written_back_bytes: float,
    row_bytes: float,
    index_key_bytes: float,
) -> ModelledStep:
    """Time of the bytes one rank moves in one step.

    Args:
        cost: rates.
        fetched_bytes: rows copied from the host.
        written_back_bytes: rows copied to the host.
        row_bytes: rows attention reads.
        index_key_bytes: index keys the indexers read.
    """
    per_ms = 1e6
    return ModelledStep(
        transfer_ms=max(fetched_bytes, written_back_bytes) / (cost.host_gb_s * per_ms),
        rows_ms=row_bytes / (cost.device_gb_s * per_ms),
        index_keys_ms=index_key_bytes / (cost.device_gb_s * per_ms),
    )
