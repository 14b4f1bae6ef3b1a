"""`--kv-connector NAME`: the short way to write `--kv-transfer-config`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_ula.compat import VERSIONS
from vllm_ula.errors import ConfigError
from vllm_ula.patches.record import Patch


def _with_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        parser = original(parser)
        parser.add_argument(
            "--kv-connector",
            choices=sorted(KVConnectorFactory._registry),
            default=None,
            metavar="NAME",
            help="KV connector with kv_role kv_both; its settings go into "
            "--kv-transfer-config '{\"kv_connector_extra_config\": {...}}'. "
            "'ula' serves KV rows from device and host memory (vllm-ula).",
        )
        return parser

    return add_cli_args


def _flag_needed() -> bool:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_parser: Any = FlexibleArgumentParser
    parser = EngineArgs.add_cli_args(make_parser())
    return "--kv-connector" not in parser._option_string_actions


def _merge(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: Any, args: Any) -> Any:
        name = getattr(args, "kv_connector", None)
        if name is not None:
            args.kv_transfer_config = merge(name, args.kv_transfer_config)
        return original(cls, args)

    return from_cli_args


def merge(name: str, transfer: Any) -> Any:
    """The transfer config of `--kv-connector name` beside `--kv-transfer-config transfer`.

    Raises:
        ConfigError: the two name different connectors.
    """
    from vllm.config import KVTransferConfig

    if transfer is None:
        return KVTransferConfig(kv_connector=name, kv_role="kv_both")
    if transfer.kv_connector not in (None, name):
        raise ConfigError(
            "--kv-connector",
            name,
            f"--kv-transfer-config names {transfer.kv_connector}",
            "one of the two",
        )
    transfer.kv_connector = name
    transfer.kv_role = transfer.kv_role or "kv_both"
    return transfer


PATCHES = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs",
        attribute="add_cli_args",
        defined_in="vllm.engine.arg_utils",
        parameters=("parser",),
        replace=_with_flag,
        versions=VERSIONS,
        why="plugins are loaded before the parser is built but have no hook to add to it",
        remove_when="vLLM has --kv-connector, or a hook for arguments of plugins",
        needed=_flag_needed,
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs",
        attribute="from_cli_args",
        defined_in="vllm.engine.arg_utils",
        parameters=("cls", "args"),
        replace=_merge,
        versions=VERSIONS,
        why="the flag and --kv-transfer-config can come in either order, so they are merged after "
        "parsing",
        remove_when="vLLM has --kv-connector",
        needed=_flag_needed,
    ),
)
