"""`kernels/` runs where there is nothing but torch and Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What torch and Triton bring along is loaded before the guard stands; whatever is loaded later is
# judged by the file whose import statement asks for it.
GUARD = """
import builtins, importlib, os, sys
from pathlib import Path

import torch
import triton.language
import triton.backends.nvidia.compiler
import triton.compiler

root, extra = Path(sys.argv[1]), sys.argv[2:]
ours = {"vllm_ula", "vllm_ula._version", "vllm_ula.records", "vllm_ula.errors"}

def may_be_imported(name):
    top = name.partition(".")[0]
    if top == "vllm_ula":
        return name in ours or (name + ".").startswith("vllm_ula.kernels.")
    return top in {"torch", "triton", "typing_extensions"} or top in sys.stdlib_module_names

def guarded(name, globals=None, locals=None, fromlist=(), level=0, original=builtins.__import__):
    file = (globals or {}).get("__file__") or ""
    if level == 0 and file.startswith((f"{root}/vllm_ula", *extra)) and not may_be_imported(name):
        raise ImportError(f"{file} imports {name}")
    return original(name, globals, locals, fromlist, level)

builtins.__import__ = guarded
for path in sorted((root / "vllm_ula" / "kernels").rglob("*.py")):
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    importlib.import_module(module)
    print("imported", module)
loaded = [name for name in sys.modules if name.partition(".")[0] == "vllm_ula"]
print(*(f"loaded besides {name}\\n" for name in loaded if not may_be_imported(name)))
sys.path += extra
for path in (path for folder in extra for path in Path(folder).glob("*.py")):
    try:
        importlib.import_module(path.stem)
        print("imported", path.stem)
    except ImportError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What is said of every module of `kernels/`, and of others that import what they name."""
    folder = tmp_path_factory.mktemp("others")
    for name in ("numpy", "tqdm", "vllm_ula.planner.pb_lru", "vllm_ula.records"):
        source = f"import torch\nimport triton\nimport {name}\n"
        (folder / f"imports_{name.rpartition('.')[2]}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", GUARD, str(ROOT), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_module_imports_with_torch_and_triton_alone(lines):
    files = (ROOT / "kernels").rglob("*.py")
    expected = {".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    assert {f"imported vllm_ula.{name}" for name in expected} <= set(lines)
    assert [line for line in lines if line.startswith("loaded besides")] == []


@pytest.mark.parametrize("name", ["numpy", "tqdm", "vllm_ula.planner.pb_lru"])
def test_control_a_module_that_imports_more_is_refused(lines, name):
    (line,) = [line for line in lines if line.endswith(f"imports {name}")]
    assert f"imports_{name.rpartition('.')[2]}.py imports" in line


def test_control_a_module_may_import_records(lines):
    assert "imported imports_records" in lines
