"""The finished config of a `vllm serve` command line, without an engine."""

from __future__ import annotations

import functools
from typing import Any

from vllm_ula import plugin


@functools.cache
def parser() -> Any:
    """The parser of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def engine_config(model: str, *arguments: str) -> Any:
    """The `VllmConfig` of `vllm serve model arguments`."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    plugin.register()  # once a process is enough for vLLM, but tests of patches take them off
    args = parser().parse_args(["--model", model, *arguments])
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()
