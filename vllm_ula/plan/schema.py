"""`vllm-ula plan --json`, schema 1: one object. Bytes and slots are whole numbers.

schema                     1; a change that breaks a reader raises it
model.name .source         what was planned for, and where its config comes from
model.layers               attention layers, MTP layers included
model.indexer_layers       of those, layers with index keys
model.domains              layers that share a selection count once
model.topk                 rows a token selects per layer; 0: it reads all
model.row_type             fp8_ds_mla or bf16
machine.gpu .gpus .source  the card, how many, and where its figures come from
parallel                   "dp" or "tp": what was asked for
lengths.shortest .mean .longest    tokens of a request, prompt and output
bytes_per_token.rows .index_keys   over all layers
per_rank.device_bytes .host_bytes  M under `parallel`, C
per_rank.device_bytes_by.dp .tp    M under either; 0 where weights leave none
engine                     UlaCache on one rank under DP, as its start-up line says; or null
engine.logical_slots .device_slots .host_slots .usable_slots .block_size .min_device_slots
engine.index_key_bytes .map_bytes .host_pool_bytes
engine.limit               what keeps it from more logical slots
engine.refused             null, or (then the others are absent) why it would not start
systems.SYSTEM.LAYOUT      SYSTEM: device_only, sglang_hisparse, vllm_hisparse, ulacache;
                           LAYOUT: dp, tp
    .status                what the figures are about; "not served by this version", or
                           "does not apply: ...", where all that follow are null or empty
    .logical_slots         tokens whose rows are held, each once; over all ranks, as are
    .device_slots .host_slots .physical_slots    rows of device, host, and both
    .unique_share          logical by physical slots, 0..1; hot rows are physical too
    .limit                 what keeps it from admitting more requests of the mean length
    .admitted              requests at once by tokens of a request, floored per rank under DP
    .raised_by             lines that say what more memory would bring
    .bytes.unique .replicas .index_keys .buffers    of all ranks
decode_step                null, or requests of the mean length on one rank,
    .requests .wanted_rows .device_rows .fits       the rows they want at most, and D
roofline.hit_rate          of selected rows on the device
roofline.cards[]           .gpu, .bytes and .microseconds of one token over .hbm, .nvlink and
                           .pcie, and the .bound of them
assumptions[]              .name .value .why of every default that was used
"""

from __future__ import annotations

from typing import Any

from vllm_ula.capacity import Parallel, System
from vllm_ula.plan.cells import Cell
from vllm_ula.plan.planned import Plan

SCHEMA = 1


def as_json(plan: Plan) -> dict[str, Any]:
    """The object that is printed."""
    tokens, question = plan.tokens, plan.question
    machine, model, lengths = question.machine, question.model, question.lengths
    return {
        "schema": SCHEMA,
        "model": {
            "name": plan.config.name,
            "source": plan.config.source,
            "layers": sum(model.domain_layers),
            "indexer_layers": tokens.indexer_layers,
            "domains": len(model.domain_layers),
            "topk": tokens.topk,
            "row_type": tokens.row_type,
        },
        "machine": {"gpu": plan.card.name, "gpus": machine.ranks, "source": plan.card.source},
        "parallel": plan.parallel.value,
        "lengths": {
            "shortest": lengths.shortest,
            "mean": lengths.mean,
            "longest": lengths.longest,
        },
        "bytes_per_token": {"rows": model.rows, "index_keys": model.index_keys},
        "per_rank": {
            "device_bytes": machine.device_bytes(plan.parallel),
            "host_bytes": machine.host_bytes,
            "device_bytes_by": {p.value: machine.device_bytes(p) for p in Parallel},
        },
        "engine": _engine(plan),
        "systems": {
            system.value: {
                found.parallel.value: _cell(plan, found)
                for found in plan.cells
                if found.system is system
            }
            for system in System
        },
        "decode_step": _step(plan),
        "roofline": {"hit_rate": plan.hit_rate, "cards": _cards(plan)},
        "assumptions": [
            {"name": taken.name, "value": taken.value, "why": taken.why}
            for taken in plan.assumptions
        ],
    }


def _engine(plan: Plan) -> dict[str, Any] | None:
    found, rank = plan.capacity, plan.question.rank
    if rank is None:
        return None
    if found is None:
        return {"refused": plan.refused}
    return {
        "logical_slots": found.logical_slots,
        "device_slots": found.device_slots,
        "host_slots": found.host_slots,
        "usable_slots": found.usable_slots,
        "block_size": found.block_size,
        "min_device_slots": rank.min_device,
        "index_key_bytes": found.index_key_bytes,
        "map_bytes": found.map_bytes,
        "host_pool_bytes": found.used_host_bytes,
        "limit": found.limit.value,
        "refused": None,
    }


def _cell(plan: Plan, cell: Cell) -> dict[str, Any]:
    held = cell.held
    kept = held.kept_bytes(plan.question.model) if held else None
    return {
        "status": cell.status.value,
        "logical_slots": held.logical_slots if held else None,
        "device_slots": held.device_slots if held else None,
        "host_slots": held.host_slots if held else None,
        "physical_slots": held.physical_slots if held else None,
        "unique_share": held.unique_share if held else None,
        "limit": cell.limit,
        "admitted": {str(length): requests for length, requests in cell.admitted.items()},
        "raised_by": list(cell.raised_by),
        "bytes": {
            "unique": kept.unique,
            "replicas": kept.replicas,
            "index_keys": kept.index_keys,
            "buffers": kept.buffers,
        }
        if kept
        else None,
    }


def _step(plan: Plan) -> dict[str, Any] | None:
    step = plan.step
    if step is None:
        return None
    return {
        "requests": step.requests,
        "wanted_rows": step.wanted_rows,
        "device_rows": step.device_rows,
        "fits": step.fits,
    }


def _cards(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "gpu": roof.card.name,
            "bytes": {
                "hbm": round(roof.hbm_bytes),
                "nvlink": round(roof.nvlink_bytes),
                "pcie": round(roof.host_bytes_moved),
            },
            "microseconds": {bus: round(micros, 3) for bus, micros in roof.micros.items()},
            "bound": roof.bound,
        }
        for roof in plan.roofs
    ]
