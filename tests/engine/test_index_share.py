"""Layers that share a selection share one map, one plan and one exchange (IndexShare)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine.harness import Request as R
from engine.harness import engine, metrics, prompts, run, worker

from vllm_ula import step as step_module
from vllm_ula.attention import store
from vllm_ula.attention.impl import UlaSparseMlaImpl

pytestmark = pytest.mark.engine

REQUESTS = [R(prompt, 8, arrives=i) for i, prompt in enumerate(prompts([150, 260, 210]))]


@pytest.mark.parametrize(("offset", "layers"), [(1, [4]), (3, [1, 1, 2])])
def test_one_plan_per_call_and_group(offset: int, layers: list[int], tmp_path: Path) -> None:
    """`index_topk_freq` 4 on 4 layers; fetched bytes are those of all layers of a group."""
    from vllm_ula.tiny_model import IndexShare, TinyModelOptions, write_tiny_model

    write_tiny_model(tmp_path, TinyModelOptions(index_share=IndexShare(4, offset)))
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def counting(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return counting

    pool = {"device_slots": 144, "host_gib": 0.05}
    with pytest.MonkeyPatch.context() as patch, engine(str(tmp_path), pool) as llm:
        patch.setattr(store, "run", counted("plans", store.run))
        patch.setattr(step_module, "transfer", counted("exchanges", step_module.transfer))
        forward = counted("layer calls", UlaSparseMlaImpl.forward_mqa)
        patch.setattr(UlaSparseMlaImpl, "forward_mqa", lambda *args: forward(*args))
        run(llm, REQUESTS)
        domains = worker().domains
        assert [len(domain.layers) for domain in domains] == layers
        forward_calls, rest = divmod(calls["layer calls"], 4)
        assert rest == 0
        assert calls["plans"] == calls["exchanges"] == forward_calls * len(layers)
        values = metrics(llm)
        assert values["fetched_rows"] > 0
        if len(layers) == 1:
            assert values["fetched_bytes"] == values["fetched_rows"] * 4 * 576 * 4
