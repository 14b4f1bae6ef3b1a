"""Runs of the command, in this process."""

import json

import pytest

from vllm_ula.cli import main

GB = 10**9
L = 90_145
# M of a rank under DP and under TP, C, of section 3 of the project's numbers.
MACHINES = {
    "h200": (28_500_000_000, int(25.94 * 2**30), 128 * GB),
    "b300": (159_400_000_000, 172 * GB, 192 * GB),
}


def text(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `vllm-ula plan` prints."""
    assert main(["plan", *map(str, arguments)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    """What `vllm-ula plan --json` prints."""
    return json.loads(text(capsys, *arguments, "--json"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that refuses."""
    assert main(["plan", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line
