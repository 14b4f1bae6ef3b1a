"""Serve long prompts from a device pool that holds an eighth of their tokens.

The same requests go to `vllm serve` with UlaCache and to the same server without it. `make demo`
runs this; `MODEL=dir` serves another DSA checkpoint than the tiny one it writes, `RECORD=dir`
writes a trace of the run with UlaCache.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import signal
import sys
from pathlib import Path

from examples import demo_plot, demo_report
from examples.demo_client import Run, send_all
from examples.demo_server import Leftovers, serve_command, serving
from examples.demo_sizes import NUM_REQUESTS, DemoError, Sizes, sizes_for
from vllm_ula.config import check_record_directory
from vllm_ula.errors import UlaError
from vllm_ula.tiny_model import write_tiny_model
from vllm_ula.traces import open_trace

FOLDER = Path(".demo")
ULA_LOG, PLAIN_LOG = FOLDER / "ula.log", FOLDER / "plain.log"


def demo(checkpoint: Path, png: Path, record: str | None = None) -> bool:
    """Run both servers one after the other and print what they did; whether all checks hold."""
    sizes = sizes_for(checkpoint)
    print(
        f"{NUM_REQUESTS} requests, {sizes.history:,} tokens in all; device pool "
        f"{sizes.device_slots:,} rows, host pool {sizes.host_gib:.3f} GiB for the rest"
    )
    ula, ula_left = serve_and_send(checkpoint, sizes, ULA_LOG, ula=True, record=record)
    demo_plot.save(png, sizes, ula.samples)
    print(f"\n{demo_report.table(sizes, ula)}\n")
    plain, plain_left = serve_and_send(checkpoint, sizes, PLAIN_LOG, ula=False)

    alike = demo_report.likenesses(ula, plain)
    checks = demo_report.checks(sizes, ula, alike, ULA_LOG, (ula_left, plain_left))
    print("\nChecks")
    print(*checks, sep="\n")
    print(f"\nlive rows and running requests over time: {png}")
    if record:
        trace = open_trace(record)
        print(f"trace of the run with UlaCache: {record}, {trace.num_rows:,} rows")
    return all(check.ok for check in checks)


def serve_and_send(
    checkpoint: Path, sizes: Sizes, log: Path, ula: bool, record: str | None = None
) -> tuple[Run, Leftovers]:
    """Start a server, send everything, stop it; on an error show the end of its log."""
    arm = "with UlaCache" if ula else "without UlaCache"
    print(f"\nServer {arm}, log in {log}:")
    print(f"  {shlex.join(serve_command(checkpoint, sizes, ula, record))}")
    try:
        with serving(checkpoint, sizes, log, ula, record) as server:
            print(f"  ready after {server.ready_s:.0f} s")
            run = send_all(server, sizes, f"  {arm}")
    except DemoError:
        print(f"\nend of {log}:", *log.read_text(errors="replace").splitlines()[-20:], sep="\n  ")
        raise
    print(f"  {sizes.history:,} tokens in {run.seconds:.1f} s, stopped")
    return run, server.leftovers


def main() -> int:
    """Command line; the exit status is 0 only if all checks hold."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--png", type=Path, default=FOLDER / "demo.png", help="where the plot goes")
    png = parser.parse_args().png
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # each stops the server
        signal.signal(number, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe shows what goes on, too
    try:
        FOLDER.mkdir(exist_ok=True)
        if model := os.environ.get("MODEL"):
            checkpoint = Path(model)
        else:
            checkpoint = FOLDER / "tiny"
            write_tiny_model(checkpoint)
        record = os.environ.get("RECORD") or None
        if record:
            check_record_directory(record)
        return 0 if demo(checkpoint, png, record) else 1
    except (DemoError, UlaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the server was stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
