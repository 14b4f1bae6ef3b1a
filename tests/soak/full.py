"""`make soak`: one engine with UlaCache and one without play the same stories for 20 minutes.

Both live through all stories. After each, tokens, logprobs and counts are compared, and nothing
may be left: no block referenced, no lease, no live row but those of cached blocks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from engine.harness import ENVIRONMENT, at_rest, no_compiler, preload
from soak.driver import MTP, NGRAM, play, soak_engine, write_model
from soak.story import Story
from tqdm import tqdm

REQUESTS = 150  # of one story
GAINED = "MiB gained after the first story, with UlaCache"
DRAFTS: dict[str, dict[str, Any] | None] = {"mtp": MTP, "ngram": NGRAM, "none": None}


def main() -> int:
    """Play stories until the time is up; 1 if an arm differed or anything was left over."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20, help="how long (%(default)s)")
    parser.add_argument("--drafts", choices=DRAFTS, default="mtp", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1000, help="of the first story (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts here too")
    arguments = parser.parse_args()

    os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as model:
        write_model(model)
        totals = soak(model, arguments.drafts, arguments.minutes * 60, arguments.seed)
    for kind, count in sorted(totals.items()):
        print(f"{count:10d} {kind}")
    if arguments.json:
        arguments.json.write_text(json.dumps(dict(sorted(totals.items())), indent=2) + "\n")
    return int(bool(totals["stories that differ"] or totals["leaks"]))


def soak(model: str, drafts: str, seconds: float, seed: int) -> Counter[str]:
    """Counts of the arm with UlaCache; ends at the first leak."""
    preload()
    totals: Counter[str] = Counter()
    totals.update({"stories that differ": 0, "leaks": 0})
    without, with_ula = arms = [_Arm(model, drafts, ula) for ula in (False, True)]
    start, resident = time.monotonic(), []
    with tqdm(total=round(seconds), unit="s", disable=None) as bar:
        while time.monotonic() - start < seconds and not totals["leaks"]:
            story = Story(seed, REQUESTS, drafts=drafts != "none")
            for arm in arms:
                arm.pipe.send(story)
            (expected, _), (found, leak) = without.pipe.recv(), with_ula.pipe.recv()
            totals.update(found.counts)
            totals["stories"] += 1
            totals["stories that differ"] += found.outputs != expected.outputs
            if leak:
                totals["leaks"] += 1
                print(f"story {seed}: {leak}")
            resident.append([psutil.Process(a.process.pid).memory_info().rss for a in arms])
            seed += 1
            bar.update(round(time.monotonic() - start) - bar.n)
    for arm in arms:
        arm.pipe.send(None)
        arm.process.join()
    grown = [(last - first) >> 20 for first, last in zip(resident[0], resident[-1], strict=True)]
    totals["MiB gained after the first story, without UlaCache"], totals[GAINED] = grown
    return totals


class _Arm:
    def __init__(self, model: str, drafts: str, ula: bool) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, model, drafts, ula))
        self.process.start()
        theirs.close()


def _serve(pipe: Connection, model: str, drafts: str, ula: bool) -> None:
    """One engine that plays the stories it is sent."""
    no_compiler()
    with soak_engine(model, DRAFTS[drafts], ula) as llm:
        while (story := pipe.recv()) is not None:
            played = play(llm, story)
            leak = ""
            try:
                if ula:
                    at_rest(llm)
            except AssertionError as error:
                leak = str(error) or "something is left at rest"
            pipe.send((played, leak))


if __name__ == "__main__":
    raise SystemExit(main())
