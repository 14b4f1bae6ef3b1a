"""Who may stand beside UlaCache in a MultiConnector: only a class that says it moves no KV."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from engine import step_log
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_ula import plugin
from vllm_ula.compat import check_connectors, ula_config, uses_ula
from vllm_ula.errors import ConfigError

OF_VLLM = sorted(set(KVConnectorFactory._registry) - {"ula"})
WORKS = "use ula alone (--kv-connector ula), or beside connectors whose class says moves_kv = False"


def connector(name: str, *children: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """One connector as a MultiConnector lists it."""
    extra = {"connectors": list(children)} if children else settings
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def logging(name: str = "StepLog") -> dict[str, Any]:
    """A connector of the tests."""
    return {**connector(name), "kv_connector_module_path": step_log.__name__}


def multi(*children: dict[str, Any]) -> Any:
    """An engine's config as far as connectors go."""
    plugin.register()
    transfer = KVTransferConfig(**connector("MultiConnector", *children))
    return SimpleNamespace(kv_transfer_config=transfer)


def refused(config: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape('kv_connector=' + line)}$"):
        check_connectors(config)


@pytest.mark.parametrize("ula_at", [0, 1, 2])
def test_beside_connectors_that_move_no_kv(ula_at: int) -> None:
    children = [logging(), logging("HybridStepLog")]
    children.insert(ula_at, connector("ula", host_gib=3))
    config = multi(*children)
    check_connectors(config)
    assert uses_ula(config)
    assert ula_config(config).host_gib == 3


@pytest.mark.parametrize("name", OF_VLLM)
def test_vllms_own_are_refused(name: str) -> None:
    """All address KV tensors by block id; some need packages that are not installed."""
    refused(
        multi(connector(name), connector("ula")),
        f"MultiConnector({name}, ula): {name} may read or write KV tensors by block id, and under "
        f"ula a block id is no place; {WORKS}",
    )


def test_a_subclass_says_it_for_itself() -> None:
    refused(
        multi(connector("ula"), logging(), logging("Undeclared")),
        "MultiConnector(ula, StepLog, Undeclared): Undeclared may read or write KV tensors by "
        f"block id, and under ula a block id is no place; {WORKS}",
    )


@pytest.mark.parametrize("said", [True, None, 0])
def test_nothing_but_false_means_no(said: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log.StepLog, "moves_kv", said)
    with pytest.raises(ConfigError, match="StepLog may read or write KV tensors"):
        check_connectors(multi(connector("ula"), logging()))


@pytest.mark.parametrize(
    "children",
    [
        (connector("ula"), connector("ula")),
        (connector("MultiConnector", connector("ula"), logging()), logging()),
        (connector("MultiConnector", connector("ula")), connector("ula")),
    ],
    ids=["twice", "nested", "nested and not"],
)
def test_one_ula_in_the_outermost_list(children: tuple[dict[str, Any], ...]) -> None:
    names = ", ".join(child["kv_connector"] for child in children)
    refused(
        multi(*children),
        f"MultiConnector({names}): an engine has one UlaCache, in the outermost list; use ula "
        "once, beside the other connectors",
    )


def test_without_ula_it_is_vllms_business() -> None:
    config = multi(connector("NixlConnector"), connector("OffloadingConnector"))
    check_connectors(config)
    assert not uses_ula(config)


def test_a_module_that_is_not_there_is_named() -> None:
    missing = {**connector("StepLog"), "kv_connector_module_path": "engine.step_lgo"}
    with pytest.raises(ModuleNotFoundError, match=r"engine\.step_lgo"):
        check_connectors(multi(connector("ula"), missing))
