"""What the demo prints: a table of the run, and one line for each thing that must hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from examples.demo_client import Metrics, Run, Token
from examples.demo_server import Leftovers
from examples.demo_sizes import BLOCK_SIZE, NUM_REQUESTS, OUTPUT_TOKENS, Sizes

TIE_LOGPROB = 0.1
INTEGRITY = re.compile(r"UlaCache: (integrity of \d+ domains holds at shutdown)")


class Likeness(Enum):
    """How a completion with UlaCache compares to the one without."""

    IDENTICAL = "identical"
    TIE = f"equal up to a tie (both tokens within {TIE_LOGPROB} logprob)"
    DIFFERENT = "different"


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        ok: whether it does.
        text: what it says, with its numbers.
    """

    ok: bool
    text: str

    def __str__(self) -> str:
        return f"  {'ok    ' if self.ok else 'FAILED'}  {self.text}"


def compare(found: Sequence[Token], expected: Sequence[Token]) -> Likeness:
    """Compare a completion to the one of the engine without UlaCache.

    Requests reach the two servers at slightly different moments, so their batches differ and with
    them rounding, which can decide between two tokens that are about equally likely. What follows
    the first difference has another context and says nothing.

    Args:
        found: with UlaCache.
        expected: without; its logprobs are given the common prefix.
    """
    for ours, theirs in zip(found, expected, strict=True):
        if ours.id != theirs.id:
            alternative = theirs.logprobs.get(ours.id, float("-inf"))
            tie = theirs.logprobs[theirs.id] - alternative <= TIE_LOGPROB
            return Likeness.TIE if tie else Likeness.DIFFERENT
    return Likeness.IDENTICAL


def likenesses(ula: Run, plain: Run) -> Counter[Likeness]:
    """How many completions are how alike."""
    return Counter(map(compare, ula.completions, plain.completions))


def table(sizes: Sizes, run: Run) -> str:
    """What happened on the server with UlaCache."""
    m = run.metrics
    physical = sum(
        m[f"ula_rows.{tier}.{state}"] for tier in ("device", "host") for state in ("live", "dead")
    )
    alone = (sizes.device_slots // BLOCK_SIZE - 1) * BLOCK_SIZE // sizes.request_tokens
    rows = [
        ("requests running at once", f"{peak(run)} (the device pool alone holds {alone})"),
        (
            "tokens",
            f"{sizes.history:,} ({NUM_REQUESTS} x {sizes.prompt_tokens:,} + {OUTPUT_TOKENS})",
        ),
        ("rows selected", _count(m["ula_selected_rows_total"])),
        ("  device hits", _count(m["ula_device_hits_total"])),
        ("  fetched from host", _moved(m, "fetched")),
        ("  read in place, device", _count(m["ula_read_in_place_rows_total.device"])),
        ("  read in place, host", _count(m["ula_read_in_place_rows_total.host"])),
        ("rows written back to host", _moved(m, "written_back")),
        ("logical slots", _count(m["ula_logical_slots"])),
        ("unique / physical rows", f"{_count(m['ula_logical_slots'])} / {_count(physical)}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def peak(run: Run) -> int:
    """Most requests seen running at once."""
    return int(max(sample.running for sample in run.samples))


def _count(value: float) -> str:
    return f"{int(value):,}"


def _moved(metrics: Metrics, direction: str) -> str:
    rows, size = metrics[f"ula_{direction}_rows_total"], metrics[f"ula_{direction}_bytes_total"]
    return f"{_count(rows)} ({size / 1e6:,.1f} MB)"


def comparison(alike: Counter[Likeness]) -> str:
    """How many completions are how alike, in one line."""
    return ", ".join(f"{alike[kind]} {kind.value}" for kind in Likeness)


def checks(
    sizes: Sizes, ula: Run, alike: Counter[Likeness], log: Path, left: tuple[Leftovers, Leftovers]
) -> list[Check]:
    """Everything the demo promises.

    Args:
        sizes: what was asked for.
        ula: the run with UlaCache.
        alike: the comparison with the run without.
        log: of the server with UlaCache, stopped.
        left: what the servers with and without UlaCache left behind.
    """
    m = ula.metrics
    parts = (
        m["ula_device_hits_total"],
        m["ula_fetched_rows_total"],
        m["ula_read_in_place_rows_total.device"] + m["ula_read_in_place_rows_total.host"],
    )
    ratio = sizes.history / sizes.device_slots
    integrity = INTEGRITY.search(log.read_text(errors="replace"))
    more = left[0].kinds() - left[1].kinds()
    return [
        Check(ratio >= 4, f"history is {ratio:.1f} times the device pool (at least 4)"),
        Check(peak(ula) == NUM_REQUESTS, f"{peak(ula)} of {NUM_REQUESTS} requests ran at once"),
        Check(
            m["ula_selected_rows_total"] == sum(parts) > 0,
            f"selected {_count(m['ula_selected_rows_total'])} = hits + fetched + read in place "
            f"{' + '.join(map(_count, parts))}",
        ),
        Check(
            min(m["ula_fetched_rows_total"], m["ula_written_back_rows_total"]) > 0,
            "rows were fetched and written back",
        ),
        Check(
            alike[Likeness.DIFFERENT] == 0,
            f"completions equal those without UlaCache: {comparison(alike)}",
        ),
        Check(integrity is not None, integrity[1] if integrity else f"no integrity line in {log}"),
        Check(
            not left[0].processes,
            f"processes left: {', '.join(left[0].processes) or 'none'}",
        ),
        Check(
            not more,
            f"files left that the server without UlaCache does not leave: "
            f"{', '.join(more.elements()) or 'none'}",
        ),
    ]
