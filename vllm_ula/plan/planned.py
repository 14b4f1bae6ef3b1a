"""From options to figures: everything that text, JSON and picture show."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ula.capacity import Capacity, Parallel, System, TokenBytes, min_device_slots
from vllm_ula.config import UlaConfig
from vllm_ula.errors import ConfigError
from vllm_ula.map_bytes import map_bytes
from vllm_ula.plan.assumptions import Assumption, Assumptions
from vllm_ula.plan.budget import machine_of
from vllm_ula.plan.cells import Cell, cell
from vllm_ula.plan.context import lengths_of
from vllm_ula.plan.hardware import Card, card
from vllm_ula.plan.models import ModelConfig, load
from vllm_ula.plan.options import Options
from vllm_ula.plan.question import Question, Rank
from vllm_ula.plan.roofline import Roof, roofs
from vllm_ula.plan.rows import Tokens, tokens_of


@dataclass(frozen=True)
class Step:
    """What decode steps of one rank want on the device, UlaCache under DP.

    Attributes:
        requests: of the mean length on this rank.
        wanted_rows: at most, if no two tokens select the same row.
        device_rows: there are.
    """

    requests: int
    wanted_rows: int
    device_rows: int

    @property
    def fits(self) -> bool:
        """Whether a step never reads in place."""
        return self.wanted_rows <= self.device_rows


@dataclass(frozen=True)
class Plan:
    """Everything that is known.

    Attributes:
        config: of the model.
        tokens: its bytes.
        card: the GPU.
        parallel: the layout that is reported in detail.
        question: what every system was asked.
        capacity: of one rank of UlaCache under DP, as the engine has it; None where it cannot be.
        refused: why it cannot be; empty where it can.
        cells: every system under DP, then under TP.
        step: what decode steps want; None without `capacity`.
        roofs: of every card.
        hit_rate: they are about.
        assumptions: every default that was used.
    """

    config: ModelConfig
    tokens: Tokens
    card: Card
    parallel: Parallel
    question: Question
    capacity: Capacity | None
    refused: str
    cells: tuple[Cell, ...]
    step: Step | None
    roofs: tuple[Roof, ...]
    hit_rate: float
    assumptions: tuple[Assumption, ...]

    def of(self, parallel: Parallel) -> list[Cell]:
        """Cells of one layout."""
        return [found for found in self.cells if found.parallel is parallel]


def plan(options: Options) -> Plan:
    """Compute everything.

    Raises:
        ConfigError: an option breaks a rule, alone or with the model and the machine.
        OSError: a file cannot be read.
    """
    notes = Assumptions()
    config = load(options.model)
    drafts = int(notes.or_default("spec_tokens", _given(options.spec_tokens)))
    tokens = tokens_of(config, options.kv_dtype, drafts)
    if options.kv_dtype is None:
        notes.take("kv_dtype", tokens.row_type, "the smallest rows this model has here")
    device = card(notes.or_default("gpu", options.gpu))
    machine = machine_of(options, device, config, tokens, notes)
    output = int(notes.or_default("output", _given(options.output)))
    lengths = lengths_of(notes.or_default("context", options.context), output, notes)
    hot_rows = int(notes.or_default("hot_rows", _given(options.hot_rows)))
    parallel = Parallel.TP if options.tp else Parallel.DP
    if not (options.tp or options.dp):
        notes.or_default("parallel", None)
    rank = _rank(options, device, tokens, drafts, notes) if tokens.is_sparse else None
    if rank is None and options.device_slots is not None:
        rule = f"{config.name} selects nothing, which UlaCache needs"
        raise ConfigError("--device-slots", options.device_slots, rule, "no --device-slots")
    question = Question(machine, tokens.model, lengths, hot_rows, rank)
    capacity, refused = None, ""
    if rank is not None:
        try:
            capacity = rank.capacity(machine)
        except ConfigError as error:
            if options.device_slots is not None:
                raise
            refused = str(error)
    hit_rate = 1.0
    if tokens.is_sparse:
        hit_rate = float(notes.or_default("hit_rate", _given(options.hit_rate)))
    step = _step(question, capacity, tokens, drafts) if capacity else None
    layout = (tokens, lengths.mean, parallel, machine.ranks, hit_rate)
    return Plan(
        config=config,
        tokens=tokens,
        card=device,
        parallel=parallel,
        question=question,
        capacity=capacity,
        refused=refused,
        cells=tuple(cell(question, system, p) for p in Parallel for system in System),
        step=step,
        roofs=tuple(roofs(*layout)),
        hit_rate=hit_rate,
        assumptions=tuple(notes.taken),
    )


def _rank(options: Options, device: Card, tokens: Tokens, drafts: int, notes: Assumptions) -> Rank:
    requests = options.max_num_seqs
    if requests is None:
        requests = device.max_num_seqs
        why = "vLLM's default when serving; D_min has a row for each of their tokens"
        notes.take("max_num_seqs", requests, why)
    decoding = requests * (1 + drafts)
    k, i = tokens.model.rows, tokens.model.index_keys
    if options.bare:
        why = "--bare: no maps, no whole blocks; the engine charges both"
        notes.take("formulas", "bare", why)
        return Rank(TokenBytes(k, i), 1, min_device_slots(tokens.topk, decoding, 1))
    block = options.block_size
    if block is None:
        block = device.block_size
        notes.take("block_size", block, "vLLM's for sparse attention on this device")
    planner = UlaConfig().planner
    where = "kernels" if device.with_kernels else "code compiled for the CPU"
    notes.take("planner", planner, f"UlaCache's default, in {where}; its maps are charged")
    token = TokenBytes.charged(
        k, i, len(tokens.model.domain_layers), map_bytes(planner, device.with_kernels)
    )
    least = min_device_slots(tokens.topk, decoding, block)
    return Rank(token, block, least, options.device_slots)


def _step(question: Question, capacity: Capacity, tokens: Tokens, drafts: int) -> Step:
    length = question.lengths.mean
    requests = capacity.requests(length)
    each = min((1 + drafts) * (tokens.topk + 1), length)
    return Step(requests, requests * each, capacity.device_slots)


def _given(value: float | None) -> str | None:
    return None if value is None else repr(value)
