"""The `vllm-ula` command. A sub-command imports what it needs when it runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from vllm_ula.errors import ConfigError, UlaError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Args:
        argv: Arguments after the program name; default: those of the process.

    Returns:
        The exit status: 0, or 2 after one line on stderr for anything refused.
    """
    try:
        arguments = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], None] = arguments.run
        run(arguments)
    except (UlaError, OSError) as error:
        print(f"vllm-ula: {error}", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line and comes back through `main`."""

    def error(self, message: str) -> NoReturn:
        raise UlaError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm-ula", description="Tools of UlaCache for vLLM.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_tiny_model(commands)
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


def _tiny_model(arguments: argparse.Namespace) -> None:
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


def _integer(key: str, works: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(key, text, "a whole number", works) from None

    return parse


def _two_integers(key: str, text: str) -> tuple[int, int]:
    try:
        first, second = text.split(":")
        return int(first), int(second)
    except ValueError:
        raise ConfigError(key, text, "two whole numbers with a colon between", "4:1") from None


if __name__ == "__main__":
    raise SystemExit(main())
