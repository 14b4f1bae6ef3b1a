"""Which requests fit at once within the same bytes, by each system's published rules.

Per rank M device bytes for KV and C host bytes; P ranks, L tokens a request, k and i bytes of a
token's rows and index keys, B hot rows a request, pages of 64 tokens.

| system | DP | TP |
|---|---|---|
| device only | P floor(M / ((k+i) L)) | floor(h M / ((k+i) L)), rows divided over h KV heads |
| SGLang HiSparse | P min(floor(C/(kL)), floor(M / (iL + k(B+64)))) | the same without P |
| vLLM HiSparse | P min(floor(C/(kL)), floor(blocks / of_request)) | P C instead of C, no P |
| UlaCache | P floor(N/L), N = (M+C) / (k+i) | floor(P N / L) |

h is 1 for a latent row: every rank keeps its own copy. A request of vLLM HiSparse takes
`ceil(L/64) + groups (ceil(B/64) + 2)` of the `M / block` blocks: index keys of all its tokens, a
hot region and two tail pages of each group of layers. UlaCache's N is without whole blocks and
without the bound that index keys set; `rank.py` has both. A ratio of two of these figures says how
many more requests fit, not how much faster they run.
"""

from __future__ import annotations

from enum import Enum

from vllm_ula.capacity.systems import PAGE, TAIL_PAGES, Machine, Model, Parallel, System


class Bound(Enum):
    """What keeps a system from admitting one more request."""

    DEVICE = "device memory"
    HOST = "host memory"
    HOT_ROWS = "device memory for index keys and hot rows"
    BOTH = "device and host memory"


def admitted(
    system: System,
    parallel: Parallel,
    machine: Machine,
    model: Model,
    length: int,
    hot_rows: int = 4096,
) -> int:
    """Requests that fit at once, floored per rank.

    Args:
        system: whose rules.
        parallel: DP or TP attention.
        machine: ranks and budgets.
        model: bytes of a token.
        length: L, prompt and output tokens of a request.
        hot_rows: B of the HiSparse systems.
    """
    return min(bounds(system, parallel, machine, model, length, hot_rows).values())


def bounds(
    system: System,
    parallel: Parallel,
    machine: Machine,
    model: Model,
    length: int,
    hot_rows: int = 4096,
) -> dict[Bound, int]:
    """Requests that each resource alone would hold. Arguments are those of `admitted`."""
    device, host = machine.device_bytes(parallel), machine.host_bytes
    data_parallel = parallel is Parallel.DP
    ranks = machine.ranks if data_parallel else 1
    k, i = model.rows, model.index_keys
    match system:
        case System.DEVICE_ONLY:
            kept = head_shards(parallel, machine, model) * device
            of_rank = {Bound.DEVICE: kept // ((k + i) * length)}
        case System.SGLANG_HISPARSE:
            of_rank = {
                Bound.HOST: host // (k * length),
                Bound.HOT_ROWS: device // (i * length + k * (hot_rows + PAGE)),
            }
        case System.VLLM_HISPARSE:
            # Ranks of a TP group share one host pool.
            pool = host if data_parallel else machine.ranks * host
            taken = num_pages(length) + hot_blocks(model, hot_rows)
            of_rank = {
                Bound.HOST: pool // (k * length),
                Bound.HOT_ROWS: device // model.block_bytes // taken,
            }
        case System.ULACACHE:
            both = device + host if data_parallel else machine.ranks * (device + host)
            of_rank = {Bound.BOTH: both // (k + i) // length}
    return {bound: ranks * fitting for bound, fitting in of_rank.items()}


def head_shards(parallel: Parallel, machine: Machine, model: Model) -> int:
    """Ranks over which TP divides the KV heads of a row; further ranks keep copies."""
    return min(machine.ranks, model.kv_heads) if parallel is Parallel.TP else 1


def hot_blocks(model: Model, hot_rows: int) -> int:
    """Blocks of vLLM HiSparse's pool for the hot rows of a request."""
    return model.block_groups * (num_pages(hot_rows) + TAIL_PAGES)


def num_pages(tokens: int) -> int:
    """Pages of 64 tokens."""
    return -(-tokens // PAGE)
