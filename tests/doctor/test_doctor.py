"""`vllm-ula doctor`: three broken machines give three different reports, a whole one gives 0."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.v1.engine import core

from vllm_ula.cli import main
from vllm_ula.doctor import machine
from vllm_ula.patches.registry import ALWAYS, ON_CPU

PATCHES = (*ALWAYS, *ON_CPU)


def run(capsys: Any, *arguments: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code, and the checks of `--json` with their problems last."""
    capsys.readouterr()
    code = main(["doctor", "--json", *arguments])
    printed = json.loads(capsys.readouterr().out)
    assert printed["exit_code"] == code
    assert all(set(check) == {"area", "name", "verdict", "text"} for check in printed["checks"])
    assert all("\n" not in check["text"] for check in printed["checks"])
    return code, printed["checks"]


def problems(checks: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(c["area"], c["name"]) for c in checks if c["verdict"] == "problem"]


def test_a_whole_machine(capsys: Any) -> None:
    before = [patch.applied() for patch in PATCHES]
    code, checks = run(capsys)
    assert (code, problems(checks)) == (0, [])
    seams = {c["name"]: c["text"] for c in checks if c["area"] == "seams"}
    assert seams == {patch.name: "applies, needed" for patch in PATCHES}
    assert [patch.applied() for patch in PATCHES] == before
    names = {c["name"] for c in checks}
    assert names >= {"vllm-ula", "torch", "vllm", "triton", "ray", "host memory", "pinning"}
    assert names >= {"NUMA", "shared memory", "address space", "device memory"}


def test_a_broken_seam(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "get_kv_cache_configs", lambda *_: None)
    code, checks = run(capsys)
    assert (code, problems(checks)) == (
        4,
        [("seams", "vllm.v1.engine.core:get_kv_cache_configs")],
    )
    (text,) = (c["text"] for c in checks if c["verdict"] == "problem")
    assert text.startswith("broken: ")
    assert text.endswith("a connector cannot add capacity")


def test_a_seam_that_is_gone(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core, "get_kv_cache_configs")
    code, checks = run(capsys)
    assert code == 4
    (text,) = (c["text"] for c in checks if c["verdict"] == "problem")
    assert text.startswith("broken: ")


def test_an_expired_patch_is_a_note(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in PATCHES:
        monkeypatch.setitem(vars(patch), "needed", lambda: False)
    code, checks = run(capsys)
    assert code == 0
    expired = [c for c in checks if c["text"].startswith("applies, expired: ")]
    assert len(expired) == len(PATCHES)
    assert {c["verdict"] for c in expired} == {"note"}


def test_a_low_limit_of_pinned_memory(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    low = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: low.get(which, real(which)))
    code, checks = run(capsys, "--gpu")
    assert (code, problems(checks)) == (5, [("machine", "pinning")])
    (text,) = (c["text"] for c in checks if c["verdict"] == "problem")
    assert text.startswith("RLIMIT_MEMLOCK is 65536 bytes (0.00 GiB), less than 1.00 GiB; ulimit")
    # A CPU pins nothing.
    code, checks = run(capsys)
    assert (code, problems(checks)) == (0, [])


def test_a_real_low_limit() -> None:
    program = "import sys; from vllm_ula.cli import main; sys.exit(main(['doctor', '--gpu']))"
    done = subprocess.run(
        ["bash", "-c", 'ulimit -l 64; exec "$0" -c "$1"', sys.executable, program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5
    assert "problem  pinning: RLIMIT_MEMLOCK is 65536 bytes" in done.stdout
    assert done.stdout.endswith("1 problem, exit code 5\n")


def test_a_small_address_space(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit
    low = {resource.RLIMIT_AS: (2**30, 2**30)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: low.get(which, real(which)))
    code, checks = run(capsys, "--host-gib", "0.5")
    assert (code, problems(checks)) == (5, [("machine", "address space")])


def test_more_host_memory_than_there_is(capsys: Any) -> None:
    code, checks = run(capsys, "--host-gib", "1000000")
    assert (code, problems(checks)) == (5, [("machine", "host memory")])
    (text,) = (c["text"] for c in checks if c["verdict"] == "problem")
    assert text.startswith("host_gib=1000000.0: the machine and its cgroup leave ")


def test_a_foreign_vllm(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    code, checks = run(capsys, str(tmp_path))
    assert (code, problems(checks)) == (3, [("versions", "vllm")])
    (text,) = (c["text"] for c in checks if c["verdict"] == "problem")
    assert text.startswith("vllm-ula supports vLLM >=0.32,<0.34, found 0.99.0; install")
    seams = [c for c in checks if c["area"] == "seams"]
    assert [c["name"] for c in seams] == ["patches", str(tmp_path)]
    assert {c["text"] for c in seams} == {"not looked at: they need a supported vLLM"}


@pytest.mark.parametrize("missing", [("vllm",), ("vllm", "torch")])
def test_without_vllm_or_torch(missing: tuple[str, ...]) -> None:
    program = (
        f"import sys\nfor name in {missing}: sys.modules[name] = None\n"
        "from vllm_ula.cli import main\nsys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (3, "")
    for name in missing:
        assert f"problem  {name}: cannot be imported: " in done.stdout


def test_a_model_that_is_accepted_and_one_that_is_not(capsys: Any, tmp_path: Path) -> None:
    from vllm_ula.tiny_model import write_tiny_model

    write_tiny_model(tmp_path / "tiny")
    code, checks = run(capsys, str(tmp_path / "tiny"))
    assert code == 0
    assert checks[-1]["area"] == "model"
    assert checks[-1]["text"].startswith("accepted: rows of type auto, blocks of 16, at least ")
    code, checks = run(capsys, str(tmp_path / "none"))
    assert (code, problems(checks)) == (6, [("model", str(tmp_path / "none"))])
    file = tmp_path / "tiny" / "config.json"
    fields = json.loads(file.read_text())
    fields |= {"index_topk_pattern": "SFFF", "num_hidden_layers": 4}
    file.write_text(json.dumps(fields))
    code, checks = run(capsys, str(tmp_path / "tiny"))
    assert code == 6
    assert "index_topk_pattern=SFFF: the first layer has no selection" in checks[-1]["text"]


def test_the_lowest_code_of_several_problems(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_SHARED_BYTES", 2**60)
    monkeypatch.setattr(core, "get_kv_cache_configs", lambda *_: None)
    code, checks = run(capsys, "--host-gib", "1000000")
    assert code == 4
    assert {area for area, _ in problems(checks)} == {"seams", "machine"}
    (shared,) = (c for c in checks if c["name"] == "shared memory")
    assert shared["verdict"] == "note"


def test_a_bad_option_is_one_line(capsys: Any) -> None:
    assert main(["doctor", "--host-gib=-1"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "vllm-ula: host_gib=-1.0: must be >= 0 GiB; use 4\n"
