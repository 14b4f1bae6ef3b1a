"""The `vllm-ula` command. A sub-command imports what it needs when it runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from vllm_ula.errors import ConfigError, UlaError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Args:
        argv: Arguments after the program name; default: those of the process.

    Returns:
        The exit status: of the sub-command, or 2 after one line on stderr for anything refused.
    """
    try:
        arguments = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except (UlaError, OSError) as error:
        print(f"vllm-ula: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and comes back through `main`."""

    def error(self, message: str) -> NoReturn:
        raise UlaError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm-ula", description="Tools of UlaCache for vLLM.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_tiny_model(commands)
    _add_replay(commands)
    _add_plan(commands)
    _add_doctor(commands)
    return parser


def _add_tiny_model(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "tiny-model",
        help="write a tiny sparse-attention checkpoint for tests and demos",
        description="Writes a tiny glm_moe_dsa checkpoint and its byte-level tokenizer into DIR.",
    )
    add = parser.add_argument
    add("directory", metavar="DIR", help="new, empty, or an earlier tiny model")
    add(
        "--layers",
        type=_integer("layers", 4),
        default=4,
        help="layers of the main model (%(default)s)",
    )
    add(
        "--topk",
        type=_integer("topk", 128),
        default=128,
        help="positions a token selects (%(default)s)",
    )
    add(
        "--index-share",
        metavar="FREQ:OFFSET",
        help="layer i has an indexer if max(i - OFFSET + 1, 0) is a multiple of FREQ, the others "
        "reuse the selection of the layer before; without it every layer has one",
    )
    add(
        "--mtp",
        type=_integer("mtp", 1),
        default=0,
        help="multi-token-prediction layers (%(default)s)",
    )
    add("--seed", type=_integer("seed", 0), default=0, help="decides every weight (%(default)s)")
    add(
        "--max-positions",
        type=_integer("max_positions", 16384),
        default=16384,
        help="longest sequence, tokens (%(default)s)",
    )
    add("--dtype", default="float32", help="float32, bfloat16 or float16 (%(default)s)")
    parser.set_defaults(run=_tiny_model)


def _add_replay(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "replay",
        help="compare policies on a recorded or a synthetic trace",
        description="Replays the selections of a trace under every policy asked for; prints hit "
        "rates, rows and bytes moved and the time to plan, saves them, and draws them.",
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", help="directory of a trace, or: synthetic")
    add(
        "--policy",
        default="pb_lru,timestamp_lru,hash_lru,sglang_hisparse,vllm_hisparse,belady",
        help="names with commas between (%(default)s)",
    )
    add(
        "--device-slots",
        type=_integers("device_slots", "1024,2048"),
        default=(),
        metavar="N,N,...",
        help="device rows of a domain (a quarter, a half and all of the trace's own)",
    )
    add("--device-gib", type=float, help="say who admits how many requests in this many GiB")
    add("--host-gib", type=float, default=0.0, help="and this many on the host (%(default)s)")
    add("--recency-buckets", type=_integer("recency_buckets", 64), default=64, help="of pb_lru")
    add("--bucket-age", default="admitted", help="of pb_lru: admitted, touched or calls")
    add("--hash-buckets", type=_integer("hash_buckets", 64), default=64, help="of hash_lru")
    add("--requests", type=_integer("requests", 4), default=4, help="of a synthetic trace")
    add("--outputs", type=_integer("outputs", 512), default=512, help="tokens of each of them")
    add("--out", metavar="DIR", help="for the table and the pictures (TRACE.replay)")
    parser.set_defaults(run=_replay)


def _add_plan(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="what fits on a machine, with UlaCache and without",
        description="Says how many requests a machine admits with UlaCache and with what would be "
        "used instead, where the bytes go and what would raise the limit. Arithmetic alone: "
        "it needs neither a GPU nor vLLM nor torch. Every default it uses is printed.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="directory of a checkpoint, a config.json, or a name")
    add("--gpu", help="h100, h200, b300 or cpu (h200)")
    add("--gpus", type=_integer("--gpus", 8), help="how many (8)")
    number, integer = _number("--kv-gib-per-gpu", 26), _integer("--kv-bytes-per-gpu", 27 * 10**9)
    add("--kv-gib-per-gpu", type=number, metavar="X", help="device memory for KV (derived)")
    add("--kv-bytes-per-gpu", type=integer, metavar="X", help="the same in bytes")
    number, integer = _number("--host-gib-per-gpu", 119), _integer("--host-bytes-per-gpu", 10**11)
    add("--host-gib-per-gpu", type=number, metavar="Y", help="host memory for rows (0)")
    add("--host-bytes-per-gpu", type=integer, metavar="Y", help="the same in bytes")
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument("--dp", action="store_true", help="details of DP attention (default)")
    layout.add_argument("--tp", action="store_true", help="details of TP attention")
    add("--context", help="prompts: 90145, 64k..128k, or a file of `tokens count` (64k..128k)")
    add("--output", type=_integer("--output", 2048), help="tokens generated per request (2048)")
    add("--kv-dtype", help="fp8_ds_mla or bf16 (the smallest the model has)")
    add("--spec-tokens", type=_integer("--spec-tokens", 2), help="drafts a step (0)")
    add("--hot-rows", type=_integer("--hot-rows", 4096), help="of HiSparse, a request (4096)")
    add("--block-size", type=_integer("--block-size", 64), help="tokens of a block (the card's)")
    add("--max-num-seqs", type=_integer("--max-num-seqs", 256), help="as of vLLM (its default)")
    add(
        "--device-slots", type=_integer("--device-slots", 4096), help="fixes UlaCache's device rows"
    )
    number = _number("--memory-fraction", 0.92)
    add("--memory-fraction", type=number, help="of the card for the engine (0.92)")
    add("--activation-gib", type=_number("--activation-gib", 8), help="neither weights nor KV (8)")
    add("--weights-gib", type=_number("--weights-gib", 100), help="on each GPU (counted)")
    add("--hit-rate", type=_number("--hit-rate", 0.9), help="for the roofline, 0..1 (0.866)")
    add("--bare", action="store_true", help="formulas alone: no maps, no whole blocks")
    add("--json", action="store_true", help="print JSON; vllm_ula/plan/schema.py documents it")
    add("--plot", type=Path, metavar="PNG", help="draw it; needs pip install 'vllm-ula[plots]'")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from vllm_ula.plan.command import run

    run(arguments)
    return 0


def _add_doctor(commands: "argparse._SubParsersAction[_Parser]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="why UlaCache would not run here",
        description="Looks at versions, at the seams of vLLM that UlaCache patches, at memory and "
        "limits, and at what --kv-connector ula would say of a model. Exit code 3: a version, 4: a "
        "seam, 5: the machine, 6: the model; the lowest, if several.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="directory of a checkpoint")
    add("--host-gib", type=_number("--host-gib", 64), default=0.0, help="of the host pool (0)")
    add("--gpu", action="store_true", help="judge pinning as for a GPU, though none is here")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from vllm_ula.doctor.command import run

    return run(arguments.model, arguments.host_gib, arguments.gpu, arguments.json)


def _replay(arguments: argparse.Namespace) -> int:
    from vllm_ula.config import UlaConfig
    from vllm_ula.replay.command import Options, run

    trace = arguments.trace
    options = Options(
        trace=trace,
        policies=tuple(arguments.policy.split(",")),
        device_slots=arguments.device_slots,
        device_gib=arguments.device_gib,
        host_gib=arguments.host_gib,
        out=Path(arguments.out or f"{trace.rstrip('/')}.replay"),
        planner=UlaConfig(
            recency_buckets=arguments.recency_buckets,
            bucket_age=arguments.bucket_age,
            hash_buckets=arguments.hash_buckets,
        ),
        requests=arguments.requests,
        outputs=arguments.outputs,
    )
    run(options)
    return 0


def _tiny_model(arguments: argparse.Namespace) -> int:
    from vllm_ula.tiny_model import IndexShare, TinyModelOptions, write_tiny_model

    share = arguments.index_share
    options = TinyModelOptions(
        layers=arguments.layers,
        topk=arguments.topk,
        index_share=None if share is None else IndexShare(*_two_integers("index_share", share)),
        mtp=arguments.mtp,
        seed=arguments.seed,
        max_positions=arguments.max_positions,
        dtype=arguments.dtype,
    )
    write_tiny_model(arguments.directory, options)
    return 0


def _integer(key: str, works: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(key, text, "a whole number", works) from None

    return parse


def _number(key: str, works: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(key, text, "a number", works) from None

    return parse


def _integers(key: str, works: str) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        try:
            return tuple(map(int, text.split(",")))
        except ValueError:
            raise ConfigError(key, text, "whole numbers with commas between", works) from None

    return parse


def _two_integers(key: str, text: str) -> tuple[int, int]:
    try:
        first, second = text.split(":")
        return int(first), int(second)
    except ValueError:
        raise ConfigError(key, text, "two whole numbers with a colon between", "4:1") from None


if __name__ == "__main__":
    raise SystemExit(main())
