"""Every bad setting ends `vllm serve` before weights load, with one line that says what works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from server import preloaded
from server.flags import engine_config
from server.harness import VLLM, Finished, environment, finish, members

from vllm_ula.compat import check_engine
from vllm_ula.errors import ConfigError, TraceError

pytestmark = pytest.mark.server

TIMEOUT_S = 120.0
LOADING = ("Loading weights", "Loading safetensors", "Starting to load model")
CONFIG_ERROR = "vllm_ula.errors.ConfigError: "
ULA = ["--kv-connector", "ula"]
BASE = ["--max-model-len", "512", "--max-num-seqs", "8", "--dtype", "float32", "--enforce-eager"]
# D_min: index_topk 128 and 8 decode tokens are 136, in whole blocks of 16 tokens 144.
D_MIN = (
    "a decode step needs 144 device rows (index_topk and one per decode token), in whole blocks "
    "of 16"
)
RANKS = "ula serves one rank per engine"
BY_BLOCK = "may read or write KV tensors by block id, and under ula a block id is no place"
USE_DSA = (
    "use a model of type deepseek_v32 or glm_moe_dsa (DeepSeek-V3.2, GLM-5.x), or no ula connector"
)


@dataclass(frozen=True)
class Refusal:
    """A bad setting and the last line it must print.

    Attributes:
        arguments: of `vllm serve`, after the model.
        line: last line of stderr: key, value, rule, a value that works. `<figure>` is a number of
            this machine.
        model: by name, see conftest.
        variables: of the environment.
        vllm_version: what vLLM says it is, if not what it is.
    """

    arguments: list[str]
    line: str
    model: str = "tiny"
    variables: dict[str, str] = field(default_factory=dict)
    vllm_version: str | None = None


def settings(**extra: object) -> list[str]:
    """Arguments that set `kv_connector_extra_config`."""
    return [*ULA, "--kv-transfer-config", json.dumps({"kv_connector_extra_config": extra})]


def transfer(**config: object) -> list[str]:
    """`--kv-transfer-config` in its long form."""
    return ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **config})]


def multi(*names: str) -> list[str]:
    """Several connectors at once."""
    connectors = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    return transfer(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": connectors}
    )


REFUSALS = {
    # Settings of ula
    "unknown key": Refusal(
        settings(host_gb=4),
        CONFIG_ERROR + "host_gb=4: is no setting of ula; use one of host_gib, device_gib, "
        "device_slots, planner, recency_buckets, bucket_age, hash_buckets, record, record_gib",
    ),
    "negative host": Refusal(
        settings(host_gib=-1), CONFIG_ERROR + "host_gib=-1: must be >= 0 GiB; use 4"
    ),
    "host no number": Refusal(
        settings(host_gib="four"), CONFIG_ERROR + "host_gib=four: must be >= 0 GiB; use 4"
    ),
    "record among files": Refusal(
        settings(record="/"),
        CONFIG_ERROR + "record=/: holds files, which a trace would mix with; use a new or an "
        "empty directory",
    ),
    "host above memory": Refusal(
        settings(host_gib=1_000_000),
        CONFIG_ERROR + "host_gib=1000000: the machine and its cgroup leave <figure> GiB; use at "
        "most <figure>",
    ),
    "device below D_min": Refusal(
        settings(device_slots=128), CONFIG_ERROR + f"device_slots=128: {D_MIN}; use at least 144"
    ),
    "device no whole block": Refusal(
        settings(device_slots=1000), CONFIG_ERROR + f"device_slots=1000: {D_MIN}; use 1008"
    ),
    "device_gib too small": Refusal(
        settings(device_gib=0.001),
        CONFIG_ERROR + "device_gib=0.001: a decode step needs 144 device rows, 1403136 bytes; use "
        "at least 0.002",
    ),
    "device_gib and device_slots": Refusal(
        settings(device_gib=1, device_slots=1024),
        CONFIG_ERROR + "device_slots=1024: fixes the device pool, which device_gib=1 sizes too; "
        "use one of the two",
    ),
    "unknown planner": Refusal(
        settings(planner="lru"),
        CONFIG_ERROR + "planner=lru: must be one of pb_lru, timestamp_lru, hash_lru; use pb_lru",
    ),
    "too few recency buckets": Refusal(
        settings(recency_buckets=1),
        CONFIG_ERROR + "recency_buckets=1: must be a whole number 2..4096; use 64",
    ),
    "malformed variable": Refusal(
        ULA,
        CONFIG_ERROR + "VLLM_ULA_CHECK=maybe: must be 0 or 1; use 1",
        variables={"VLLM_ULA_CHECK": "maybe"},
    ),
    # Flags that contradict each other
    "host size twice": Refusal(
        [*settings(host_gib=1), "--kv-offloading-size", "2"],
        CONFIG_ERROR + "--kv-offloading-size=2.0: host_gib=1 sets the host pool too; use one of "
        "the two",
    ),
    "other offloading backend": Refusal(
        [*ULA, "--kv-offloading-size", "2", "--kv-offloading-backend", "lmcache"],
        CONFIG_ERROR + "--kv-offloading-backend=lmcache: is another way to use host memory than "
        "the ula connector; use --kv-offloading-backend native with --kv-connector ula",
    ),
    "two connectors named": Refusal(
        [*ULA, *transfer(kv_connector="ExampleConnector")],
        CONFIG_ERROR + "--kv-connector=ula: --kv-transfer-config names ExampleConnector; use one "
        "of the two",
    ),
    "unknown connector": Refusal(
        ["--kv-connector", "ulla"],
        "vllm serve: error: argument --kv-connector: invalid choice: 'ulla' (choose from "
        "<names>, 'ula')",
    ),
    # What else wants the rows
    "connector beside ula": Refusal(
        multi("NixlConnector", "ula"),
        CONFIG_ERROR
        + f"kv_connector=MultiConnector(NixlConnector, ula): NixlConnector {BY_BLOCK}; "
        "use ula alone (--kv-connector ula), or beside connectors whose class says "
        "moves_kv = False",
    ),
    "role of a producer": Refusal(
        transfer(kv_connector="ula", kv_role="kv_producer"),
        CONFIG_ERROR + "kv_role=kv_producer: ula hands no KV to other engines; use kv_both",
    ),
    "rows of another fp8": Refusal(
        [*ULA, "--kv-cache-dtype", "fp8_e5m2"],
        CONFIG_ERROR + "--kv-cache-dtype=fp8_e5m2: is no type of rows of a DSA model here; use one "
        "of auto, float16, bfloat16, fp8, fp8_ds_mla",
    ),
    # Ways to parallelise
    "pipeline parallel": Refusal(
        [*ULA, "--pipeline-parallel-size", "2"],
        CONFIG_ERROR + f"--pipeline-parallel-size=2: {RANKS}; use 1",
    ),
    "tensor parallel": Refusal(
        [*ULA, "--tensor-parallel-size", "2"],
        CONFIG_ERROR + f"--tensor-parallel-size=2: {RANKS}; use 1",
    ),
    "decode context parallel": Refusal(
        [*ULA, "--tensor-parallel-size", "2", "--decode-context-parallel-size", "2"],
        CONFIG_ERROR + f"--decode-context-parallel-size=2: {RANKS}; use 1",
    ),
    "dual batch overlap": Refusal(
        [*ULA, "--enable-dbo"],
        CONFIG_ERROR + "--enable-dbo=True: two batches at once would change homes under each "
        "other; use no --enable-dbo",
    ),
    # Models and versions
    "model without DSA": Refusal(
        ULA,
        CONFIG_ERROR + f"model=llama: has no DeepSeek Sparse Attention ula knows; {USE_DSA}",
        model="llama",
    ),
    "DeepSeek-V4": Refusal(
        ULA,
        CONFIG_ERROR + "model=deepseek_v4: keeps compressed rows, which ula does not address yet; "
        f"{USE_DSA}",
        model="deepseek_v4",
    ),
    "hybrid": Refusal(
        ULA,
        CONFIG_ERROR + "model=qwen3_next: is a hybrid with recurrent state, which has no rows to "
        f"address; {USE_DSA}",
        model="qwen3_next",
    ),
    "older vLLM": Refusal(
        ULA,
        "vllm_ula.errors.VersionError: vllm-ula supports vLLM >=0.32,<0.34, found 0.31.0",
        vllm_version="0.31.0",
    ),
}

# Device memory is known once weights are loaded. vLLM adds a summary of its own after the line.
AFTER_LOADING = {
    "more blocks than memory": Refusal(
        [*settings(device_slots=256, host_gib=0.01), "--num-gpu-blocks-override", "1000"],
        CONFIG_ERROR + "num_gpu_blocks_override=1000: device and host memory hold 88 logical "
        "blocks of 16 tokens; use at most 88, or more host_gib",
    ),
}
# vLLM's own refusal comes first on a CPU; `test_hisparse_beside_ula` holds ours.
BY_VLLM = {
    "HiSparse": Refusal(
        [*ULA, "--attention-config", '{"hisparse_config": {}}'],
        "  Value error, HiSparse currently requires NVIDIA CUDA. <rest>",
    ),
}
ALL = REFUSALS | AFTER_LOADING | BY_VLLM

# These go through the console script itself; the last two are the slow ones and start processes.
BY_CONSOLE = ("unknown key", *AFTER_LOADING, *BY_VLLM)


def run(refusal: Refusal, models: dict[str, str]) -> Finished:
    """Run the console script until it gives up."""
    command = [VLLM, "serve", models[refusal.model], *BASE, *refusal.arguments]
    return finish(command, environment(**refusal.variables), TIMEOUT_S)


@pytest.fixture(scope="module")
def refused(
    request: pytest.FixtureRequest, models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Finished]:
    """The runs of the selected tests: by the console script, or by forks that share its imports."""
    here = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in here if hasattr(item, "callspec")]
    found = {name: run(ALL[name], models) for name in names if name in BY_CONSOLE}
    commands = {
        name: {
            "arguments": ["serve", models[ALL[name].model], *BASE, *ALL[name].arguments],
            "variables": ALL[name].variables,
            "version": ALL[name].vllm_version,
        }
        for name in names
        if name not in found
    }
    directory = tmp_path_factory.mktemp("refusals")
    done = subprocess.run(
        [sys.executable, str(Path(preloaded.__file__)), str(directory)],
        input=json.dumps(commands),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for name, (session, status) in json.loads(done.stdout.splitlines()[-1]).items():
        out, err = (Path(directory, f"{name}.{end}").read_text() for end in ("out", "err"))
        found[name] = Finished(status, out, err, members(session))
    return found


def same_line(found: str, expected: str) -> bool:
    """Whether a line is the expected one, up to figures and names of the machine."""
    pattern = re.escape(expected).replace("<figure>", r"[\d.]+")
    return re.fullmatch(re.sub("<names>|<rest>", ".+", pattern), found) is not None


def assert_gone(finished: Finished) -> None:
    assert finished.status > 0
    assert finished.processes == []


def assert_not_loaded(finished: Finished) -> None:
    output = finished.stdout + finished.stderr
    assert not [words for words in LOADING if words in output]


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str, refused: dict[str, Finished]) -> None:
    finished = refused[name]
    assert_gone(finished)
    assert_not_loaded(finished)
    last = finished.stderr.rstrip().splitlines()[-1]
    assert same_line(last, REFUSALS[name].line), last


@pytest.mark.parametrize("name", AFTER_LOADING)
def test_refused_after_loading(name: str, refused: dict[str, Finished]) -> None:
    finished = refused[name]
    assert_gone(finished)
    lines = [line for line in finished.stderr.splitlines() if CONFIG_ERROR in line]
    assert lines, finished.stderr[-2000:]
    assert lines[-1] == AFTER_LOADING[name].line


@pytest.mark.parametrize("name", BY_VLLM)
def test_refused_by_vllm(name: str, refused: dict[str, Finished]) -> None:
    finished = refused[name]
    assert_gone(finished)
    assert_not_loaded(finished)
    assert any(same_line(line, BY_VLLM[name].line) for line in finished.stderr.splitlines())


def test_hisparse_beside_ula(models: dict[str, str]) -> None:
    """What a CUDA machine says: there vLLM lets HiSparse pass."""
    from vllm.config.attention import HiSparseConfig

    config = engine_config(models["tiny"], *BASE, *ULA)
    config.attention_config.hisparse_config = HiSparseConfig()
    with pytest.raises(ConfigError, match="hisparse_config=set: HiSparse manages the same rows"):
        check_engine(config)


def test_sleep_mode(models: dict[str, str]) -> None:
    """vLLM refuses it on a CPU; where it does not, UlaCache does."""
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        engine_config(models["tiny"], *BASE, *ULA, "--enable-sleep-mode")

    config = engine_config(models["tiny"], *BASE, *ULA)
    config.model_config.enable_sleep_mode = True
    line = (
        "--enable-sleep-mode=True: vLLM would discard device rows and keep the host pool and the "
        "maps; use no --enable-sleep-mode"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        check_engine(config)


def test_recording(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM would have to start first: two engines; and an environment without pyarrow."""
    config = engine_config(models["tiny"], *BASE, *settings(record=str(tmp_path)))
    config.parallel_config.data_parallel_size = 2
    line = (
        f"record={tmp_path}: 2 data-parallel engines would write into one directory; use "
        "--data-parallel-size 1"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        check_engine(config)

    config.parallel_config.data_parallel_size = 1
    check_engine(config)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match=r"not installed: pip install 'vllm-ula\[trace\]'$"):
        check_engine(config)


def test_role_in_a_multi_connector(models: dict[str, str]) -> None:
    child = {"kv_connector": "ula", "kv_role": "kv_consumer"}
    flags = transfer(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [child]}
    )
    with pytest.raises(ConfigError, match=r"^kv_role=kv_consumer: ula hands no KV"):
        engine_config(models["tiny"], *BASE, *flags)


def test_dense_mla(models: dict[str, str]) -> None:
    """The nearest miss: a DeepSeek without an indexer. Refused as any model without DSA."""
    with pytest.raises(ConfigError, match="model=deepseek_v3: has no DeepSeek Sparse Attention"):
        engine_config(models["deepseek_v3"], *BASE, *ULA)
