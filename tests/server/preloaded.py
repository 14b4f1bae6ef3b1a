"""`vllm serve` many times for the price of one import, which is nearly all a refusal costs.

Reads {name: Command} as JSON from standard input. Each command is a fork of this process, which has
imported what the console script imports but not started anything. Its output goes to
DIRECTORY/name.out and DIRECTORY/name.err, {name: [session, exit status]} to standard output.

python preloaded.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TypedDict

AT_ONCE = 2


class Command(TypedDict):
    """Arguments of `vllm`, variables of its environment, and what version vLLM says it is."""

    arguments: list[str]
    variables: dict[str, str]
    version: str | None


def run(command: Command) -> int:
    """What the `vllm` console script does; returns its exit status."""
    import vllm
    from vllm.entrypoints.cli.main import main

    os.environ.update(command["variables"])
    vllm.__version__ = command["version"] or vllm.__version__
    sys.argv = ["vllm", *command["arguments"]]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(command: Command, output: Path) -> int:
    """Fork a command with files for its output; returns its process id."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    for path, number in (
        ("/dev/null", 0),
        (f"{output}.out", 1),
        (f"{output}.err", 2),
    ):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    status = run(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def preload() -> None:
    """Import what the console script imports."""
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server  # noqa: F401


def main() -> None:
    """Run all commands, a few at a time."""
    preload()
    commands: dict[str, Command] = json.load(sys.stdin)
    names, ended = {}, {}
    waiting = list(commands.items())
    while waiting or names:
        while waiting and len(names) < AT_ONCE:
            name, command = waiting.pop(0)
            names[start(command, Path(sys.argv[1], name))] = name
        child, status = os.wait()
        ended[names.pop(child)] = child, os.waitstatus_to_exitcode(status)
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
