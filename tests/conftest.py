"""The time budget of each suite: one folder of tests/ is one suite."""

import os
from collections import defaultdict
from pathlib import Path

import pytest

# Triton decides when it is imported whether it interprets kernels; any test module may import it.
os.environ["TRITON_INTERPRET"] = "1"

# Seconds of each suite, waits included; two files run at a time, 25 minutes in all at most.
BUDGET_S = {
    "repository": 20,
    "core": 240,
    "kernels": 360,
    "v2_runner": 360,
    "traces": 60,
    "reference": 60,
    "replay": 60,
    "plan": 60,
    "doctor": 120,
    "patches": 60,
    "engine": 600,
    "scheduler": 120,
    "matrix": 480,
    "soak": 480,
    "server": 900,
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print tests, seconds and budget of every suite that ran."""
    tests: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                suite = Path(report.fspath).parts[1]
                tests[suite].add(report.nodeid)
                seconds[suite] += report.duration
    if not tests:
        return
    terminalreporter.section("time budgets")
    for suite in sorted(tests):
        budget = BUDGET_S.get(suite)
        verdict = ""
        if budget is None:
            verdict = "  NO BUDGET: declare one in tests/conftest.py"
        elif seconds[suite] > budget:
            verdict = "  OVER BUDGET"
        terminalreporter.line(
            f"{suite:<12} {len(tests[suite]):>4} tests {seconds[suite]:>6.1f} s"
            f" of {budget if budget is not None else '-':>4} s{verdict}"
        )
