"""Servers killed with requests in flight, and starts without the memory they need.

vLLM itself leaves something behind: sockets, and orphans when its front end is killed. So a server
without UlaCache is killed the same way at the same time, and UlaCache's may leave no more than it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from server.harness import (
    LET_GO_S,
    SHARED_MEMORY,
    VLLM,
    Finished,
    Forks,
    RunningServer,
    abandoned,
    environment,
    finish,
    mapped,
    scratch,
    wait_until,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

UNTIL_S = 200.0
HOLD_S = 3.0  # for which clients stay after SIGTERM
QUIET_S = 6.0  # longer than the 5 s that vLLM gives a process to end
NUM_IN_FLIGHT = 4
BASE = ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(NUM_IN_FLIGHT)]
SERVED = [
    *("--served-model-name", "tiny", "--max-model-len", "1024"),
    *("--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "260"),
]
ULA = ["--kv-connector", "ula", "--kv-offloading-size"]
DEVICE = ["--kv-transfer-config", '{"kv_connector_extra_config": {"device_slots": 512}}']
# vLLM would bind the threads of every server to the same cores.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with contextlib.closing(Forks()) as found:
        yield found


# The host pool alone is more than the limit, and everything else is well below it.
HOST_GIB = 3
LIMIT_KIB = 2560 << 10

# The second map cannot be allocated: the host pool is there by then, and one domain.
PARTIAL_FAILURE = """\
import gc, json, sys
from unittest import mock

import psutil
from vllm import LLM, SamplingParams

import vllm_ula
from vllm_ula.planning import make
from vllm_ula.residency import Residency

resident = []


def measure():
    gc.collect()
    resident.append(psutil.Process().memory_info().rss)


def one_map(*sizes):
    if len(resident) == 1:
        measure()
        return Residency(*sizes)
    raise MemoryError("no second map")


def start(host_gib):
    settings = vllm_ula.kv_transfer_config(host_gib=host_gib, device_slots=512)
    return LLM(
        sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4,
        kv_transfer_config=settings,
    )


measure()
error = ""
with mock.patch.object(make, "Residency", one_map):
    try:
        start(1)
    except MemoryError as raised:
        error = str(raised)
measure()
llm = start(0.25)
outputs = llm.generate(
    {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False
)
measure()
print("\\nRESULT", json.dumps([error, resident, len(outputs[0].outputs[0].token_ids)]))
"""


@dataclass(frozen=True)
class Refused:
    """Starts that the system refused memory.

    Attributes:
        server: whose host pool could not be mapped.
        left: regular files in its temporary directory.
        abandoned: its files in shared memory.
        partial: a process that runs `PARTIAL_FAILURE`.
    """

    server: Finished
    left: list[str]
    abandoned: set[str]
    partial: Finished


@pytest.fixture(scope="module")
def refused(models: dict[str, str], forks: Forks) -> Refused:
    """Both at the same time; `forks` imports meanwhile."""
    serve = [VLLM, "serve", models["tiny"], *BASE, "--max-model-len", "512", *ULA, str(HOST_GIB)]
    limited = ["sh", "-c", f'ulimit -d {LIMIT_KIB}; exec "$@"', "sh", *serve]
    partial = [sys.executable, "-c", PARTIAL_FAILURE, models["tiny"]]
    shared = set(os.listdir(SHARED_MEMORY))
    with scratch() as directory, ThreadPoolExecutor(2) as pool:
        env = environment(**UNBOUND, TMPDIR=directory)
        server = pool.submit(finish, limited, env, UNTIL_S)
        in_process = environment(**UNBOUND, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        other = pool.submit(finish, partial, in_process, UNTIL_S)
        ended = server.result()
        left = [str(path) for path in Path(directory).rglob("*") if path.is_file()]
        partly = other.result()
    wait_until(lambda: not abandoned(shared), LET_GO_S)
    return Refused(ended, left, abandoned(shared), partly)


def test_a_refused_host_pool_ends_the_server_with_a_line(refused: Refused) -> None:
    assert refused.server.status == 1
    assert re.search(
        r"vllm_ula\.errors\.HostMemoryError: host pool of 3\d{9} bytes \(3\.00 GiB\) could not be "
        r"mapped: \[Errno 12\] Cannot allocate memory; lower host_gib$",
        refused.server.stdout,
        re.M,
    ), refused.server.stdout[-4000:]


def test_a_refused_host_pool_leaves_nothing(refused: Refused) -> None:
    assert refused.server.processes == []
    assert refused.left == []  # of vLLM itself there are sockets
    assert refused.abandoned == set()


def test_a_start_that_fails_halfway_gives_back_what_it_took(refused: Refused) -> None:
    """And the next start in that process takes what it is told, not what the first one was."""
    assert refused.partial.status == 0, refused.partial.stderr[-4000:]
    (line,) = [x for x in refused.partial.stdout.splitlines() if x.startswith("RESULT ")]
    error, (before, taken, failed, again), num_tokens = json.loads(line.removeprefix("RESULT "))
    assert error == "no second map"
    assert taken - before > 0.9 * 2**30
    assert failed - before < 0.5 * 2**30
    assert 0.25 * 2**30 < again - before < 0.5 * 2**30
    assert num_tokens == 8


@dataclass(frozen=True)
class Kill:
    """Who is killed, and how.

    Attributes:
        process: start of its name; empty: the server itself.
        signals: one after the other, the second while the first is being handled.
        flags: of the server.
    """

    process: str = ""
    signals: tuple[signal.Signals, ...] = (signal.SIGKILL,)
    flags: tuple[str, ...] = ()


# In this order; a start of the same command follows every kill but the last.
KILLS = {
    "engine core": Kill("VLLM::EngineCor"),
    "worker": Kill("VLLM::Worker"),
    "server": Kill(),
    "SIGTERM twice": Kill("", (signal.SIGTERM, signal.SIGTERM), ("--shutdown-timeout", "2")),
    "SIGTERM": Kill("", (signal.SIGTERM,)),
}


@dataclass
class Arm:
    """A command line, started again after every kill.

    Attributes:
        arguments: of `vllm serve`.
        directory: temporary files of its servers; what they leave stays there for the next one.
        answers: tokens of one request, asked anew after every start.
        left: kinds of what the last server left.
    """

    arguments: list[str]
    directory: Path
    answers: list[list[int]] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)


def kind(name: str) -> str:
    """A name without what is random in it."""
    return re.sub(r"(?<=mp-)\w{8}|[0-9a-f]{8}(-?[0-9a-f]{4,})*", "*", name)


def files(directory: Path) -> set[str]:
    """Everything below a directory."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def remains(server: RunningServer, shared: set[str], created: set[str]) -> Counter[str]:
    """Kinds of what there still is of a server.

    Args:
        server: dead or alive.
        shared: its files in shared memory, as far as they are known.
        created: its files elsewhere.
    """
    shared = (shared | mapped(server.processes())) & set(os.listdir(SHARED_MEMORY))
    names = [
        *(f"process {name}" for name in server.members()),
        *(f"shared memory {name}" for name in shared),
        *(f"file {name}" for name in created),
    ]
    return Counter(map(kind, names))


def clean(server: RunningServer, shared: set[str]) -> None:
    """End a server; its shared memory goes first, lest another test finds it abandoned."""
    for name in shared | mapped(server.processes()):
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    server.kill()


STAND_IN = """\
import sys, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

memory = SharedMemory(create=True, size=1)
Path(sys.argv[1], "pool-0123abcd").touch()
print(flush=True)
time.sleep(600)
"""


def test_what_is_left_is_found(tmp_path: Path) -> None:
    """The control of the comparison: one thing of each sort."""
    command = [sys.executable, "-c", STAND_IN, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        server = RunningServer(process.pid, 0, tmp_path / "log")
        try:
            assert process.stdout is not None
            process.stdout.readline()
            found = remains(server, set(), files(tmp_path))
        finally:
            clean(server, set())
    (name,) = {name for name in found if name.startswith("process python")}
    assert found == Counter({name: 2, "shared memory psm_*": 1, "file pool-*": 1})


def settle(servers: Sequence[RunningServer]) -> None:
    """Wait until no process of them is left, or none has ended for a while."""
    seen, since = None, time.monotonic()
    while any(now := [server.processes() for server in servers]):
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > QUIET_S:
            return
        time.sleep(0.2)


def connect(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def completion(seed: int, length: int, max_tokens: int) -> dict[str, Any]:
    """A greedy completion of random bytes."""
    rng = random.Random(seed)
    return {
        "model": "tiny",
        "prompt": [rng.randrange(256) for _ in range(length)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }


def first_answer(server: RunningServer) -> list[int]:
    """Tokens of a request with more rows than UlaCache has on the device."""
    server.wait_until_ready(UNTIL_S)
    with connect(server) as client:
        answer: Any = client.completions.create(**completion(0, 700, 8))
    tokens: list[int] = answer.choices[0].token_ids
    return tokens


def num_running(server: RunningServer) -> float:
    """Requests that the server computes."""
    (value,) = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", server.get("/metrics"), re.M)
    return float(value)


@contextlib.contextmanager
def in_flight(servers: Sequence[RunningServer]) -> Iterator[None]:
    """Decoding requests of every server, whose clients hang up at the end."""
    with contextlib.ExitStack() as clients:
        streams: list[Any] = []
        for server in servers:
            client = clients.enter_context(connect(server))
            for seed in range(1, NUM_IN_FLIGHT + 1):
                stream = client.completions.create(**completion(seed, 200, 700), stream=True)
                streams.append(clients.enter_context(stream))
        for stream in streams * 2:
            next(stream)
        assert [num_running(server) for server in servers] == [NUM_IN_FLIGHT] * len(servers)
        yield


def deliver(kill: Kill, server: RunningServer) -> None:
    """Send the signals."""
    found = [pid for pid, name in server.processes().items() if name.startswith(kill.process)]
    (pid,) = found if kill.process else [server.pid]
    for number, each in enumerate(kill.signals):
        if number:
            assert wait_until(lambda: "shutdown triggered" in server.log, 10), server.log[-2000:]
        os.kill(pid, each)


@pytest.fixture(scope="module")
def arms(models: dict[str, str]) -> Iterator[tuple[Arm, Arm]]:
    """Without UlaCache, and with it."""
    command = [models["tiny"], *BASE, *SERVED]
    with scratch() as without, scratch() as with_ula:
        yield (
            Arm(command, Path(without)),
            Arm([*command, *ULA, "0.05", *DEVICE], Path(with_ula)),
        )


@pytest.fixture(scope="module", params=KILLS)
def killed(
    request: pytest.FixtureRequest,
    arms: tuple[Arm, Arm],
    forks: Forks,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Arm, Arm]:
    """Both arms after a server of each was started, asked, killed, measured and cleaned up."""
    kill = KILLS[request.param]
    logs = tmp_path_factory.mktemp("logs")
    before = [files(arm.directory) for arm in arms]
    shared: list[set[str]] = [set(), set()]
    servers: list[RunningServer] = []
    try:
        for arm in arms:
            arguments = [*arm.arguments, *kill.flags]
            variables = {**UNBOUND, "TMPDIR": str(arm.directory)}
            servers.append(forks.serve(arguments, variables, logs / str(len(servers))))
        with ThreadPoolExecutor(len(arms)) as pool:
            for arm, tokens in zip(arms, pool.map(first_answer, servers), strict=True):
                arm.answers.append(tokens)
        with in_flight(servers):
            shared = [mapped(server.processes()) for server in servers]
            for server in servers:
                deliver(kill, server)
            # Told to end, vLLM waits for its clients or hangs up on them first: that is a race.
            if signal.SIGTERM in kill.signals:
                wait_until(lambda: not any(server.processes() for server in servers), HOLD_S)
        settle(servers)
        for arm, server, names, old in zip(arms, servers, shared, before, strict=True):
            arm.left = remains(server, names, files(arm.directory) - old)
    finally:
        for server, names in zip(servers, shared, strict=False):
            clean(server, names)
    return arms


def test_a_kill_leaves_no_more_than_without_ula(killed: tuple[Arm, Arm]) -> None:
    without, with_ula = killed
    assert with_ula.left - without.left == Counter()


def test_every_start_after_a_kill_gives_the_same_tokens(killed: tuple[Arm, Arm]) -> None:
    without, with_ula = killed
    assert len(with_ula.answers[0]) == 8
    assert with_ula.answers == without.answers == [without.answers[0]] * len(without.answers)
