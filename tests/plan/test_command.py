"""The command as people run it: known answers, refusals, and what it needs installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plan.rig import MACHINES, L, planned, refused, text

ROOT = Path(__file__).parents[2]
GLM = ("GLM-5.3", "--gpus", 8)
ONE = ("--context", L, "--output", 0)


def given(card: str, parallel: str) -> tuple[object, ...]:
    """Arguments with M and C in bytes."""
    dp, tp, host = MACHINES[card]
    device = dp if parallel == "dp" else tp
    return ("--gpu", card, "--kv-bytes-per-gpu", device, "--host-bytes-per-gpu", host)


@pytest.mark.parametrize("bare", [(), ("--bare",)], ids=["engine", "bare"])
@pytest.mark.parametrize(
    ("card", "system", "dp", "tp"),
    [
        ("h200", "device_only", 40, 5),
        ("h200", "sglang_hisparse", 216, 27),
        ("h200", "vllm_hisparse", 216, 48),
        ("h200", "ulacache", 256, 256),
        ("b300", "device_only", 256, 35),
        ("b300", "sglang_hisparse", 328, 41),
        ("b300", "vllm_hisparse", 328, 300),
        ("b300", "ulacache", 576, 598),
    ],
)
def test_the_16_cells(capsys, bare, card, system, dp, tp):
    for parallel, requests in (("dp", dp), ("tp", tp)):
        found = planned(capsys, *GLM, *given(card, parallel), *ONE, *bare, f"--{parallel}")
        assert found["systems"][system][parallel]["admitted"] == {str(L): requests}


def test_the_bare_formulas_give_the_published_slots(capsys):
    found = planned(capsys, *GLM, *given("b300", "dp"), *ONE, "--bare")["systems"]
    ours, theirs = found["ulacache"]["dp"], found["sglang_hisparse"]["dp"]
    assert round(theirs["logical_slots"] / 1e6, 2) == 30.02
    assert round(ours["logical_slots"] / 1e6, 1) == 52.1
    assert round(ours["logical_slots"] / theirs["logical_slots"], 3) == 1.736
    assert ours["logical_slots"] // L == 578
    budget = ("--kv-bytes-per-gpu", 159_300_000_000, "--host-bytes-per-gpu", 192 * 10**9)
    theirs = planned(capsys, *GLM, *budget)["systems"]["sglang_hisparse"]["dp"]
    assert round(theirs["physical_slots"] / 1e6, 1) == 53.3
    h200 = planned(capsys, *GLM, *given("h200", "dp"))["systems"]["sglang_hisparse"]["dp"]
    assert round(h200["logical_slots"] / 1e6, 2) == 20.01
    assert h200["logical_slots"] // L == 222


def test_unique_share_under_tensor_parallelism(capsys):
    found = planned(capsys, *GLM, *given("b300", "tp"), "--tp")["systems"]
    assert found["device_only"]["tp"]["unique_share"] == 0.125
    assert found["ulacache"]["tp"]["unique_share"] == 1.0


def test_a_prompt_of_a_gqa_model_takes_85_90_gb(capsys):
    found = planned(capsys, "Llama-3.3-70B", "--tp")
    assert found["bytes_per_token"] == {"rows": 327_680, "index_keys": 0}
    assert round(found["bytes_per_token"]["rows"] * 262_144 / 1e9, 2) == 85.90


def test_maps_and_whole_blocks_are_charged_unless_bare(capsys):
    exact = planned(capsys, *GLM, *given("b300", "dp"))
    bare = planned(capsys, *GLM, *given("b300", "dp"), "--bare")
    assert exact["engine"]["map_bytes"] > 1e9
    assert exact["engine"]["logical_slots"] % 64 == exact["engine"]["device_slots"] % 64 == 0
    assert bare["engine"]["map_bytes"] == 0
    assert 0.995 < exact["engine"]["logical_slots"] / bare["engine"]["logical_slots"] < 1


def test_more_host_helps_until_index_keys_fill_the_device(capsys):
    found = planned(capsys, *GLM, "--kv-gib-per-gpu", 5, "--host-gib-per-gpu", 20)
    host, device = found["systems"]["ulacache"]["dp"]["raised_by"]
    assert host.startswith("+32 GiB host a GPU: +")
    assert device.startswith("+8 GiB device a GPU: +")
    budget = ("--kv-gib-per-gpu", 5, "--host-gib-per-gpu", 500)
    found = planned(capsys, *GLM, *budget)["systems"]["ulacache"]["dp"]
    assert found["limit"].startswith("index keys, which fill the device")
    assert found["raised_by"][0] == "+32 GiB host a GPU: no request more"
    words = found["raised_by"][2].split()
    assert words[:4] == ["all", "host", "memory", "is"]
    enough = float(words[words.index("from") + 1]) + 0.1
    found = planned(capsys, *GLM, "--kv-gib-per-gpu", enough, "--host-gib-per-gpu", 500)
    assert found["systems"]["ulacache"]["dp"]["limit"] == "device and host memory"


def test_what_more_memory_brings_is_what_it_admits(capsys):
    def admitted(device, host):
        budget = ("--kv-gib-per-gpu", device, "--host-gib-per-gpu", host)
        cells = planned(capsys, *GLM, *budget, *ONE)["systems"]
        return {
            (name, layout): (cell["admitted"][str(L)], cell["raised_by"])
            for name, layouts in cells.items()
            for layout, cell in layouts.items()
        }

    now, more = admitted(100, 100), admitted(100, 132)
    for key, (requests, raised_by) in now.items():
        gain = more[key][0] - requests
        if key[0] == "device_only":
            assert gain == 0
        elif gain > 1:
            assert raised_by[0] == f"+32 GiB host a GPU: +{gain} requests"
        elif not gain:
            assert raised_by[0] == "+32 GiB host a GPU: no request more"


BLOCKED = """
import sys
for name in ("torch", "vllm", "numpy", "numba", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError
from vllm_ula.cli import main
code = main(sys.argv[1:])
loaded = {"torch", "vllm", "numpy"} & {n for n, module in sys.modules.items() if module}
sys.exit(f"loaded {loaded}" if loaded else code)
"""
RUN = ("GLM-5.3", "--gpu", "b300", "--gpus", "8", "--host-gib-per-gpu", "178.8", "--tp")


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-c", program, "plan", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_neither_vllm_nor_torch_nor_numpy_is_imported(more):
    done = run(BLOCKED, *RUN, *more)
    assert (done.returncode, done.stderr) == (0, "")
    assert "GLM-5.3" in done.stdout


def test_control_the_block_stands():
    done = run(BLOCKED.replace("from vllm_ula.cli", "import torch\nfrom vllm_ula.cli"), *RUN)
    assert done.returncode == 1
    assert "torch" in done.stderr


def test_a_picture_without_vllm_and_torch(tmp_path):
    # matplotlib itself needs NumPy.
    program = BLOCKED.replace('"numpy", "numba"', '"numba"').replace(', "numpy"}', "}")
    picture = tmp_path / "new" / "plan.png"
    done = run(program, *RUN, "--plot", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert done.stdout.endswith(f"saved {picture}\n")


def test_a_picture_without_matplotlib_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = refused(capsys, *GLM, "--plot", tmp_path / "plan.png")
    assert line == "vllm-ula: --plot needs matplotlib: pip install 'vllm-ula[plots]'"


@pytest.mark.parametrize("flag", ["--gpus", "--output", "--spec-tokens", "--hot-rows"])
def test_negative_numbers_are_refused(capsys, flag):
    assert refused(capsys, "GLM-5.3", f"{flag}=-1").startswith(f"vllm-ula: {flag}=-1: must be >= ")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["GLM-5.3", "--host-gib-per-gpu=-1"], "--host-gib-per-gpu=-1.0: must be >= 0"),
        (["GLM-5.3", "--kv-bytes-per-gpu=-5"], "--kv-bytes-per-gpu=-5: must be >= 0"),
        (["GLM-5.3", "--host-gib-per-gpu", "nan"], "--host-gib-per-gpu=nan: must be >= 0"),
        (["GLM-5.3", "--kv-gib-per-gpu", "inf"], "--kv-gib-per-gpu=inf: must be >= 0"),
        (["GLM-5.3", "--gpus", "eight"], "--gpus=eight: a whole number; use 8"),
        (["GLM-5.3", "--gpus", "0"], "--gpus=0: must be >= 1"),
        (["GLM-5.3", "--hit-rate", "92"], "--hit-rate=92.0: must be <= 1"),
        (["GLM-5.3", "--memory-fraction", "1.2"], "--memory-fraction=1.2: must be <= 1"),
        (["GLM-5.3", "--gpu", "h20"], "--gpu=h20: is no card with figures here; use one of h100"),
        (["GLM-5.3", "--gpu", "cpu"], "--gpu=cpu: has no memory that is known"),
        (["GLM-5.3", "--gpu", "h100"], "--gpus=8: 88.0 GiB of weights a GPU and 8 GiB of reserve"),
        (["GLM-6"], "MODEL=GLM-6: is no built-in name and no config"),
        (["GLM-5.3", "--kv-dtype", "nvfp4"], "--kv-dtype=nvfp4: is no type of rows here"),
        (["Llama-3.3-70B", "--kv-dtype", "fp8_ds_mla"], "--kv-dtype=fp8_ds_mla: keeps latent rows"),
        (["Llama-3.3-70B", "--device-slots", "4096", "--tp"], "--device-slots=4096: Llama-3.3-70B"),
        (["GLM-5.3", "--device-slots", "100"], "device_slots=100: must be whole blocks of 64"),
        (["GLM-5.3", "--context", "long"], "--context=long: is no length, no range and no file"),
        (
            ["GLM-5.3", "--context", "128k..64k"],
            "--context=128k..64k: its second length is smaller",
        ),
        (
            ["GLM-5.3", "--kv-gib-per-gpu", "1", "--kv-bytes-per-gpu", "1"],
            "--kv-gib-per-gpu=1.0: says what --kv-bytes-per-gpu says too; use one of the two",
        ),
        (
            ["GLM-5.3", "--host-gib-per-gpu", "1", "--host-bytes-per-gpu", "1"],
            "--host-gib-per-gpu=1.0: says what --host-bytes-per-gpu says too",
        ),
        (
            ["GLM-5.3", "--kv-gib-per-gpu", "1", "--weights-gib", "80"],
            "--kv-gib-per-gpu=1.0: says what --weights-gib says too",
        ),
        (["GLM-5.3", "--dp", "--tp"], "argument --tp: not allowed with argument --dp"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_nonsense_gets_one_line_and_exit_code_2(capsys, arguments, start):
    assert refused(capsys, *arguments).startswith(f"vllm-ula: {start}")


def test_a_device_too_small_for_a_step_admits_nothing_and_says_so(capsys):
    out = text(capsys, *GLM, "--kv-gib-per-gpu", 0.1, "--host-gib-per-gpu", 10)
    assert "refuses to start: device_gib=0.1: a decode step needs 3072 device rows" in out
    found = planned(capsys, *GLM, "--kv-gib-per-gpu", 0.1, "--host-gib-per-gpu", 10)
    assert set(found["systems"]["ulacache"]["dp"]["admitted"].values()) == {0}
    assert found["engine"]["refused"].startswith("device_gib=0.1: ")


def test_a_config_without_the_needed_fields_is_refused(capsys, tmp_path):
    file = tmp_path / "config.json"
    for content, start in [
        ({}, f"MODEL={tmp_path.name}: its config has no model_type"),
        ({"model_type": "glm_moe_dsa"}, f"MODEL={tmp_path.name}: its config has no num_hidden_l"),
        ({"model_type": "deepseek_v4"}, "model=deepseek_v4: keeps compressed rows"),
        ({"model_type": "bert"}, "model=bert: has no DeepSeek Sparse Attention"),
        ({"model_type": "llama", "num_hidden_layers": "x"}, f"MODEL={tmp_path.name}: its config"),
        ([], f"MODEL={file}: is no JSON object"),
    ]:
        file.write_text(json.dumps(content))
        assert refused(capsys, tmp_path).startswith(f"vllm-ula: {start}")
    file.write_text("{")
    assert refused(capsys, file).startswith(f"vllm-ula: MODEL={file}: is no JSON object")
    assert refused(capsys, tmp_path / "other").startswith("vllm-ula: MODEL=")
