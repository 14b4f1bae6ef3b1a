"""Every kernel compiles for GPUs that are not here, and uses what it may."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

import vllm_ula.kernels.__main__ as command
from vllm_ula.kernels import inventory
from vllm_ula.kernels.resources import TARGETS, Resources, resources
from vllm_ula.kernels.variant import Variant

ROOT = Path(__file__).parents[2]


def run(*arguments):
    """A process that compiles kernels, as this one interprets them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET")
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="session")
def report():
    done = run("-m", "vllm_ula.kernels", "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def controls():
    done = run("tests/kernels/compilation_controls.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(params=TARGETS)
def target(request):
    return request.param


@pytest.fixture
def compiled(report, target):
    found = [variant for variant in report["variants"] if variant["target"] == target]
    assert found
    return found


def test_every_operation_is_in_the_report(report):
    named = {operation["name"] for operation in report["operations"]}
    assert named == {operation.name for operation in inventory.operations()}
    for operation in report["operations"]:
        for part in ("file", "reference", "tests"):
            assert (ROOT / operation[part]).is_file()


def test_every_variant_compiles(compiled, target):
    wrong = {v["name"]: v["complaint"] for v in compiled if v["used"] is None}
    assert wrong == {}
    every = [v for file in inventory.files() for v in inventory.variants(file)]
    expected = [v.name for v in every if TARGETS[target].backend in v.backends]
    assert [v["name"] for v in compiled] == expected


def test_names_of_variants_differ(compiled):
    names = [v["name"] for v in compiled]
    assert sorted(set(names)) == sorted(names)


def test_kernels_of_every_decode_step_do_not_spill(compiled):
    spilled = {v["name"]: v["used"]["spilled_bytes"] for v in compiled if v["hot"] and v["used"]}
    assert {name: n for name, n in spilled.items() if n} == {}


def test_kernels_that_move_rows_load_and_store_16_bytes(compiled):
    used = {v["name"]: v["used"] for v in compiled if v["moves_rows"] and v["used"]}
    narrow = [name for name, u in used.items() if not (u["wide_loads"] and u["wide_stores"])]
    assert narrow == []


def test_control_a_kernel_that_spills_is_found(controls, target):
    assert controls["spills"][target]["spilled_bytes"] > 0
    assert controls["aligned"][target]["spilled_bytes"] == 0


def test_control_unaligned_pointers_form_no_16_byte_accesses(controls, target):
    aligned, unaligned = controls["aligned"][target], controls["unaligned"][target]
    assert aligned["wide_loads"] > 0
    assert aligned["wide_stores"] > 0
    assert unaligned["wide_loads"] == unaligned["wide_stores"] == 0


def test_control_resources_are_read(controls, target):
    aligned, spills = controls["aligned"][target], controls["spills"][target]
    assert 0 < aligned["registers"] < spills["registers"]
    # The sum passes between warps.
    assert aligned["shared_bytes"] == 0 < spills["shared_bytes"]


def test_control_a_kernel_that_does_not_compile_is_found(controls, target):
    assert "undefined is not defined" in controls["broken"][target]["error"]
    assert "the kernel has ['BLOCK'" in controls["incomplete"][target]["error"]


def test_nothing_is_compiled_where_kernels_are_interpreted(capsys):
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        resources(inventory.variants("translate")[0], "sm_90")
    with pytest.raises(SystemExit) as refused:
        command.main([])
    assert refused.value.code == 2
    message = "TRITON_INTERPRET is set: kernels compile in a process without it\n"
    assert capsys.readouterr().err == message


def test_an_unknown_target_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        command.main(["--targets", "sm_90,sm_1"])
    assert "--targets sm_1: must be of sm_90, sm_100, gfx942" in capsys.readouterr().err


class TestWhatIsPrinted:
    """The compiler's answer is given: how it is judged and shown."""

    @pytest.fixture
    def printed(self, monkeypatch, capsys):
        def run(answer, *arguments):
            variant = Variant("moves", None, {}, hot=True, wide_loads=True)
            monkeypatch.setattr(inventory, "files", lambda: ["translate"])
            monkeypatch.setattr(inventory, "variants", lambda file: (variant,))
            monkeypatch.setattr(command, "resources", answer)
            with monkeypatch.context() as context:
                context.setattr(triton.knobs.runtime, "interpret", False)
                code = command.main(["--targets", "sm_90,gfx942", *arguments])
            return code, capsys.readouterr().out

        return run

    def test_what_a_variant_uses(self, printed):
        code, text = printed(lambda variant, target: Resources(30, 64, 0, 2, 1))
        assert code == 0
        assert "translate\n  kernel     kernels/translate.py\n" in text
        assert "  tests      tests/kernels/test_translate.py\n  sm_90      ok\n" in text
        (line,) = [line for line in text.splitlines() if line.startswith("moves ") and "sm" in line]
        assert line.split() == ["moves", "sm_90", "30", "64", "0", "2,", "1"]

    def test_the_tables_of_the_readme(self, printed):
        _, text = printed(lambda variant, target: Resources(30, 64, 0, 2, 1), "--markdown")
        operations, variants = text.split("\n\n")
        assert "| `translate` | tested | compiles | compiles | not run |" in operations
        assert variants.splitlines() == [
            "| variant | sm_90 | gfx942 |",
            "|---|---|---|",
            "| moves | 30 / 64 / 0 / 2 / 1 | 30 / 64 / 0 / 2 / 1 |",
        ]

    @pytest.mark.parametrize(
        ("used", "complaint"),
        [
            (Resources(30, 64, 8, 2, 1), "spills 8 bytes"),
            (Resources(30, 64, 0, 0, 1), "no 16-byte loads or no 16-byte stores"),
            (Resources(30, 64, 0, 2, 0), "no 16-byte loads or no 16-byte stores"),
        ],
    )
    def test_control_what_a_kernel_must_not_use(self, printed, used, complaint):
        code, text = printed(lambda variant, target: used)
        assert code == 1
        assert f"  gfx942     moves: {complaint}\n" in text

    def test_control_a_kernel_that_does_not_compile(self, printed):
        def answer(variant, target):
            raise NameError("at 2:37:\nsource\nundefined")

        code, text = printed(answer)
        assert code == 1
        assert "  sm_90      moves: NameError: undefined\n" in text

    def test_an_installation_has_no_tests(self, printed, monkeypatch, tmp_path):
        monkeypatch.setattr(inventory, "TESTS", tmp_path / "none")
        _, text = printed(lambda variant, target: Resources(30, 64, 0, 2, 1))
        assert "  tests      not in this installation\n" in text
