"""One server under load: what its clients get, what it tells, and how it ends."""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.harness import (
    SHARED_MEMORY,
    Finished,
    Server,
    abandoned,
    environment,
    scratch,
    wait_until,
)

pytestmark = pytest.mark.server

NUM_REQUESTS = 8
PROMPT_TOKENS = 640
OUTPUT_TOKENS = 24
BLOCK_SIZE = 16
ROW_BYTES = 4 * 576 * 4  # layers, latent and rope, float32
BLOCKS = NUM_REQUESTS * math.ceil((PROMPT_TOKENS + OUTPUT_TOKENS) / BLOCK_SIZE) + 1
LOGICAL = BLOCKS * BLOCK_SIZE
DEVICE = (LOGICAL // 8) // BLOCK_SIZE * BLOCK_SIZE
HOST = LOGICAL - DEVICE
MAX_MODEL_LEN = 1024
BROKEN_OFF_TOKENS = MAX_MODEL_LEN - PROMPT_TOKENS
NUM_BROKEN_OFF = 50
DRAIN_S = 30  # by default vLLM kills its processes the moment it is told to stop

COUNTERS = {
    "vllm:ula_selected_rows_total",
    "vllm:ula_device_hits_total",
    "vllm:ula_fetched_rows_total",
    "vllm:ula_read_in_place_rows_total.device",
    "vllm:ula_read_in_place_rows_total.host",
    "vllm:ula_written_back_rows_total",
    "vllm:ula_fetched_bytes_total",
    "vllm:ula_written_back_bytes_total",
    "vllm:ula_exchanges_total",
}
HISTOGRAMS = {
    f"vllm:ula_{name}_seconds_{part}"
    for name in ("plan", "transfer")
    for part in ("bucket", "count", "sum")
}
ROWS = {
    f"vllm:ula_rows.{tier}.{state}" for tier in ("device", "host") for state in ("live", "dead")
}
LOGICAL_SLOTS, LEASES = "vllm:ula_logical_slots", "vllm:ula_leases"

LABELS = ("tier", "state")

Metrics = dict[str, float]


@dataclass
class Visit:
    """What was seen of the server, in this order.

    Attributes:
        idle: metrics before the first request.
        cold: tokens of a request.
        warm: tokens of the same request, sent again.
        loaded: tokens of all requests at once.
        broken_off: texts of streams until their clients went away.
        afterwards: tokens of the first request, once more.
        busy: metrics after all of it.
        left: files in its temporary directory and in shared memory after its end.
        end: its exit and its log.
    """

    idle: Metrics = field(default_factory=dict)
    cold: list[int] = field(default_factory=list)
    warm: list[int] = field(default_factory=list)
    loaded: list[list[int]] = field(default_factory=list)
    broken_off: list[str] = field(default_factory=list)
    afterwards: list[int] = field(default_factory=list)
    busy: Metrics = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    end: Finished | None = None

    @property
    def log(self) -> str:
        """Everything the server printed."""
        assert self.end is not None
        return self.end.stdout


def prompts(count: int) -> list[list[int]]:
    """Random bytes, without common prefixes."""
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def arguments(model: str) -> list[str]:
    """A device pool for an eighth of the tokens, host memory for the others."""
    extra = {"kv_connector_extra_config": {"device_slots": DEVICE}}
    options: dict[str, Any] = {
        "--served-model-name": "tiny",
        "--kv-connector": "ula",
        "--kv-offloading-size": math.ceil(HOST * ROW_BYTES / 2**30 * 1e5) / 1e5,
        "--kv-transfer-config": json.dumps(extra),
        "--dtype": "float32",
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-seqs": NUM_REQUESTS,
        "--max-num-batched-tokens": 512,
        "--shutdown-timeout": DRAIN_S,
    }
    return [model, "--enforce-eager", *(str(word) for option in options.items() for word in option)]


def complete(client: openai.OpenAI, prompt: Sequence[int]) -> list[int]:
    """Tokens of a greedy completion."""
    answer = client.completions.create(
        model="tiny",
        prompt=list(prompt),
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return tokens


def break_off(client: openai.OpenAI, prompt: Sequence[int]) -> str:
    """Text of the first tokens of a long stream, whose client then goes away."""
    stream = client.completions.create(
        model="tiny",
        prompt=list(prompt),
        max_tokens=BROKEN_OFF_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream:
        return "".join(next(stream).choices[0].text for _ in range(3))


def metrics(server: Server) -> Metrics:
    """Values at /metrics, labels of LABELS appended to the name; the last bucket of histograms."""
    values = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            labels = [sample.labels[key] for key in LABELS if key in sample.labels]
            values[".".join([sample.name, *labels])] = sample.value
    return values


def drained(server: Server) -> bool:
    """Whether the server knows that nothing runs any more."""
    return metrics(server)["vllm:num_requests_running"] == 0


@pytest.fixture(scope="module")
def visit(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Visit:
    """Start a server, use it, stop it."""
    found = Visit()
    shared = set(os.listdir(SHARED_MEMORY))
    log: Path = tmp_path_factory.mktemp("server") / "log"
    first, second, *_ = everything = prompts(NUM_REQUESTS)
    with scratch() as directory:
        # Every second, so that the line of the load is not ten seconds away.
        env = environment(TMPDIR=directory, VLLM_LOG_STATS_INTERVAL="1")
        server = Server(arguments(models["tiny"]), env, log)
        try:
            server.wait_until_ready(180)
            found.idle = metrics(server)
            with openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0
            ) as client:
                found.cold = complete(client, first)
                found.warm = complete(client, first)
                with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                    found.loaded = list(pool.map(lambda p: complete(client, p), everything))
                with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                    leaving = [second] * NUM_BROKEN_OFF
                    found.broken_off = list(pool.map(lambda p: break_off(client, p), leaving))
                assert wait_until(lambda: drained(server), 30)
                found.afterwards = complete(client, first)
            assert wait_until(lambda: drained(server), 30)
            time.sleep(1.5)  # for the periodic line of the last interval
            found.busy = metrics(server)
            found.end = server.stop(DRAIN_S + 30)
            wait_until(lambda: not abandoned(shared), 5)
            found.left = sorted([*os.listdir(directory), *abandoned(shared)])
        finally:
            server.kill()
    return found


def test_every_metric_is_there_from_the_start(visit: Visit) -> None:
    ours = {name for name in visit.idle if name.startswith("vllm:ula_") and "_created" not in name}
    assert ours == COUNTERS | HISTOGRAMS | ROWS | {LOGICAL_SLOTS, LEASES}


@pytest.mark.parametrize(
    "name", sorted(COUNTERS | {h for h in HISTOGRAMS if not h.endswith("bucket")})
)
def test_metric_moves_under_load(visit: Visit, name: str) -> None:
    assert visit.idle[name] == 0
    assert visit.busy[name] > 0


def test_selected_rows_add_up(visit: Visit) -> None:
    values = visit.busy
    assert values["vllm:ula_selected_rows_total"] == (
        values["vllm:ula_device_hits_total"]
        + values["vllm:ula_fetched_rows_total"]
        + values["vllm:ula_read_in_place_rows_total.device"]
        + values["vllm:ula_read_in_place_rows_total.host"]
    )


def test_at_rest_no_lease_is_left_and_live_rows_are_those_of_cached_blocks(visit: Visit) -> None:
    """No draft was made; whole blocks of every prompt and output are cached, nothing else lives."""
    values = visit.busy
    assert values[LEASES] == 0
    live = values["vllm:ula_rows.device.live"] + values["vllm:ula_rows.host.live"]
    assert live % BLOCK_SIZE == 0
    assert live >= NUM_REQUESTS * (PROMPT_TOKENS // BLOCK_SIZE) * BLOCK_SIZE // 2


def test_bytes_are_rows(visit: Visit) -> None:
    """Every domain is one layer of rows of 576 floats."""
    for name in ("fetched", "written_back"):
        rows = visit.busy[f"vllm:ula_{name}_rows_total"]
        assert visit.busy[f"vllm:ula_{name}_bytes_total"] == rows * 576 * 4


def test_rows_of_both_tiers_are_the_logical_slots(visit: Visit) -> None:
    values = visit.busy
    assert values[LOGICAL_SLOTS] == LOGICAL
    assert values["vllm:ula_rows.device.live"] + values["vllm:ula_rows.device.dead"] == DEVICE
    assert values["vllm:ula_rows.host.live"] + values["vllm:ula_rows.host.dead"] == HOST


def test_start_line(visit: Visit) -> None:
    (line,) = [line for line in visit.log.splitlines() if "UlaCache: " in line and "slots" in line]
    assert (
        f"UlaCache: {LOGICAL} logical slots = {DEVICE} device rows + {HOST} host rows "
        "(unique = physical rows, replicas 0)"
    ) in line
    assert f"index keys {LOGICAL * 4 * 132} bytes" in line
    assert f"host pool {HOST * ROW_BYTES} bytes" in line
    requests = (BLOCKS - 1) // (MAX_MODEL_LEN // BLOCK_SIZE)
    assert f" {requests} requests of {MAX_MODEL_LEN} tokens; " in line


def test_periodic_line(visit: Visit) -> None:
    lines = re.findall(r"KV Transfer metrics: (ula selected rows=\d.*)", visit.log)
    assert any(int(re.findall(r"ula fetched rows=(\d+)", line)[0]) > 0 for line in lines), lines


def test_a_warm_request_gets_the_tokens_of_a_cold_one(visit: Visit) -> None:
    assert visit.busy["vllm:prefix_cache_hits_total"] >= PROMPT_TOKENS - BLOCK_SIZE
    assert visit.warm == visit.cold


def test_every_request_of_the_load_was_served(visit: Visit) -> None:
    assert [len(tokens) for tokens in visit.loaded] == [OUTPUT_TOKENS] * NUM_REQUESTS
    assert len(set(map(tuple, visit.loaded))) == NUM_REQUESTS


def test_clients_that_go_away_leave_the_server_serving(visit: Visit) -> None:
    whole = OUTPUT_TOKENS * (NUM_REQUESTS + 3)  # of the requests that were not broken off
    assert len(visit.broken_off) == NUM_BROKEN_OFF
    assert all(visit.broken_off)
    broken_off = visit.busy["vllm:generation_tokens_total"] - whole
    assert 3 * NUM_BROKEN_OFF <= broken_off < BROKEN_OFF_TOKENS * NUM_BROKEN_OFF
    assert visit.afterwards == visit.cold


def test_it_ends_when_asked_to(visit: Visit) -> None:
    assert visit.end is not None
    assert visit.end.status == 0
    assert "UlaCache: integrity of 4 domains holds at shutdown" in visit.log
    ours = [line for line in visit.log.splitlines() if 'File "' in line and "vllm_ula/" in line]
    assert ours == []  # vLLM's own front end may report that its engine core ended first


def test_it_leaves_nothing_behind(visit: Visit) -> None:
    assert visit.end is not None
    assert visit.end.processes == []
    # vLLM leaves these in its temporary directory without UlaCache too.
    sockets_and_cache = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|torchinductor_\w+")
    assert [name for name in visit.left if not sockets_and_cache.fullmatch(name)] == []
