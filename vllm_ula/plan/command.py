"""`vllm-ula plan`."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields

from vllm_ula.plan.options import Options
from vllm_ula.plan.planned import plan
from vllm_ula.plan.report import report
from vllm_ula.plan.schema import as_json


def run(arguments: argparse.Namespace) -> None:
    """Plan, print, draw.

    Raises:
        UlaError: an option breaks a rule, or matplotlib is missing.
        OSError: a file cannot be read or written.
    """
    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    found = plan(options)
    if options.plot is not None:
        from vllm_ula.plan.plot import draw

        draw(options.plot, found)
    print(json.dumps(as_json(found), indent=2) if options.json else report(found))
    if options.plot is not None and not options.json:
        print(f"\nsaved {options.plot}")
