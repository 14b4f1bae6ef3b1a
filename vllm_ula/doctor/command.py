"""`vllm-ula doctor`.

Exit codes: 0 fine, 2 a bad option, 3 a version, 4 a seam of vLLM, 5 the machine, 6 the model; the
lowest, if several. `--json` prints an object: exit_code, and checks[] with area, name, verdict
("ok", "note", "problem") and text.
"""

from __future__ import annotations

import json
import os
import warnings

from vllm_ula.config import UlaConfig
from vllm_ula.doctor.check import Area, Check, Verdict, exit_code
from vllm_ula.doctor.versions import check_versions


def run(model: str | None, host_gib: float, for_gpu: bool, as_json: bool) -> int:
    """Look at everything, print it, and return the exit code.

    Raises:
        ConfigError: `host_gib` breaks its rule.
    """
    UlaConfig(host_gib=host_gib)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        checks = diagnose(model, host_gib, for_gpu)
    code = exit_code(checks)
    print(_json(checks, code) if as_json else _text(checks, code))
    return code


def diagnose(model: str | None, host_gib: float, for_gpu: bool) -> list[Check]:
    """Every check. Seams and model need a vLLM that is supported: without one they are left out."""
    checks = list(check_versions())
    if exit_code(checks):
        names = ["patches", *([] if model is None else [model])]
        left_out = "not looked at: they need a supported vLLM"
        checks += [Check(Area.SEAMS, name, Verdict.NOTE, left_out) for name in names]
    else:
        from vllm_ula.doctor.seams import check_seams

        checks += check_seams()
    if not any(check.name == "torch" and check.verdict is Verdict.PROBLEM for check in checks):
        from vllm_ula.doctor.machine import check_machine

        checks += check_machine(host_gib, for_gpu)
    if model is not None and not exit_code([c for c in checks if c.area is not Area.MACHINE]):
        from vllm_ula.doctor.model import check_model

        checks.append(check_model(model, host_gib))
    return checks


def _text(checks: list[Check], code: int) -> str:
    lines = []
    for area in Area:
        mine = [check for check in checks if check.area is area]
        if not mine:
            continue
        lines.append(area.name.lower())
        lines += [f"  {check.verdict.value:<8} {check.name}: {check.text}" for check in mine]
    problems = sum(check.verdict is Verdict.PROBLEM for check in checks)
    summary = f"{problems} problem{'s' if problems != 1 else ''}" if problems else "no problem"
    return "\n".join([*lines, f"{summary}, exit code {code}"])


def _json(checks: list[Check], code: int) -> str:
    found = [
        {
            "area": check.area.name.lower(),
            "name": check.name,
            "verdict": check.verdict.value,
            "text": check.text,
        }
        for check in checks
    ]
    return json.dumps({"exit_code": code, "checks": found}, indent=2)
