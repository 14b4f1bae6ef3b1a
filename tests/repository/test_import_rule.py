"""Who may import whom inside vllm_ula, and which modules may see vLLM, Triton and Ray."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_ula"
LINKS = ("connectors", "kernels", "patches")

# A module imports from its own row and the rows above it.
LAYERS = (
    (
        "_version",
        "arrays",
        "records",
        "errors",
        "config",
        "capacity",
        "models",
        "host_memory",
        "logical_id",
    ),
    ("kernels", "traces"),
    ("map_bytes", "residency", "planner", "pinned", "pools", "streams", "transfer"),
    ("planning",),
    ("step",),
    ("replay", "plan"),
    ("connectors", "attention", "block_manager", "compat", "metrics"),
    ("patches",),
    ("plugin", "cli", "tiny_model", "doctor"),
)
LAYER = {name: i for i, row in enumerate(LAYERS) for name in row}

MAY_IMPORT_VLLM = {*LAYERS[6], *LAYERS[7], "plugin", "doctor"}
# Below the layers that know vLLM, torch is the only third party, with the typing backport it
# brings; kernels/ adds Triton, what is compiled for the CPU numba. What reads traces needs neither
# torch nor an engine.
TORCH = {"torch", "typing_extensions"}
THIRD_PARTY = {name: TORCH for row in LAYERS[:5] for name in row}
THIRD_PARTY |= {name: TORCH | {"numba", "numpy"} for name in ("planner", "planning")}
THIRD_PARTY |= {"replay": TORCH | {"matplotlib", "numba", "numpy", "tqdm"}}
# `vllm-ula plan` runs where none of them is installed.
THIRD_PARTY |= {"plan": {"matplotlib"}, "capacity": set(), "models": set(), "map_bytes": set()}
THIRD_PARTY |= {name: TORCH | {"numpy"} for name in ("arrays", "residency")}
THIRD_PARTY |= {"logical_id": {"numpy"}, "traces": {"numpy", "pyarrow"}}
PEERS = {
    "kernels": {"kernels", "records", "errors"},
    "traces": {"traces", "errors", "logical_id"},
}


@dataclass(frozen=True)
class Import:
    line: int
    name: str  # dotted, as far as it names a module or a module's attribute
    at_top: bool  # runs when the importing module is imported


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import of a module of `package`, those inside functions and literal names included."""

    def visit(node: ast.AST, at_top: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(node.lineno, alias.name, at_top)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parents, base]).rstrip(".")
                for alias in node.names:
                    yield Import(node.lineno, f"{base}.{alias.name}", at_top)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(node.lineno, name, at_top)
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                at_top = False
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                at_top = False
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_top)

    yield from visit(ast.parse(source), at_top=True)


def modules(package: Path) -> Iterator[Path]:
    """Every Python file below `package`, through links, relative to it."""
    for folder, _, files in os.walk(package, followlinks=True):
        for file in files:
            if file.endswith(".py"):
                yield (Path(folder) / file).relative_to(package)


def reason_against(path: Path, imported: Import) -> str | None:
    """Say which rule forbids the module at `path` that import, or None."""
    owner = path.parts[0].removesuffix(".py")
    target, _, rest = imported.name.partition(".")
    match target:
        case "vllm_ula":
            peer = rest.partition(".")[0]
            if owner in PEERS and peer in LAYER and peer not in PEERS[owner]:
                return f"{owner} may import only {', '.join(sorted(PEERS[owner]))}"
            if peer in LAYER and owner != "__init__" and LAYER[peer] > LAYER[owner]:
                return f"{owner} is below {peer}"
            return None
        case "ray":
            return "ray is not used"
        case "triton":
            is_op = path.parts[0] == "kernels" and len(path.parts) == 2 and path.stem != "dispatch"
            return None if is_op else "triton belongs to kernels/<op>.py"
        case "vllm":
            if owner in MAY_IMPORT_VLLM or (owner == "__init__" and not imported.at_top):
                return None
            return "vllm is not visible here"
    third_party = target not in sys.stdlib_module_names
    if third_party and owner in THIRD_PARTY and target not in THIRD_PARTY[owner]:
        return f"third parties here: {', '.join(sorted(THIRD_PARTY[owner])) or 'none'}"
    if third_party and owner == "__init__" and imported.at_top:
        return "importing vllm_ula must stay free"
    return None


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(modules(package)):
        owner = path.parts[0].removesuffix(".py")
        if owner not in LAYER and owner != "__init__":
            found.append(f"{path}: has no layer")
            continue
        source = (package / path).read_text()
        for imported in imports(source, ".".join(["vllm_ula", *path.parent.parts])):
            if reason := reason_against(path, imported):
                found.append(f"{path}:{imported.line}: {imported.name}: {reason}")
    return found


def test_modules_keep_the_import_rule():
    assert violations(PACKAGE) == []


def test_modules_are_reached_through_the_links():
    assert {path.parts[0] for path in modules(PACKAGE)} >= set(LINKS)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("residency.py", "from vllm_ula.step import run", "residency is below step"),
        ("pools.py", "from . import plugin", "pools is below plugin"),
        ("planner/lru.py", "from ..step import run", "planner is below step"),
        ("step.py", "def f():\n    import vllm_ula.patches.rope", "step is below patches"),
        ("kernels/reference/copy.py", "from vllm_ula.config import C", "kernels may import only"),
        ("capacity/rank.py", "import vllm", "vllm is not visible"),
        ("capacity/rank.py", "import torch", "third parties here: none"),
        ("plan/report.py", "import numpy", "third parties here: matplotlib"),
        ("cli.py", "def f():\n    import vllm.config", "vllm is not visible"),
        ("config.py", "if TYPE_CHECKING:\n    import vllm.config", "vllm is not visible"),
        ("__init__.py", "import vllm", "vllm is not visible"),
        ("__init__.py", "from torch import Tensor", "must stay free"),
        ("errors.py", "from importlib import import_module\nimport_module('vllm')", "not visible"),
        ("kernels/dispatch.py", "import triton", "triton belongs to"),
        ("kernels/reference/copy.py", "import triton.language as tl", "triton belongs to"),
        ("plugin.py", "import ray", "ray is not used"),
        ("transfer.py", "import psutil", "third parties here: torch"),
        ("transfer.py", "import numpy", "third parties here: torch"),
        ("traces/reader.py", "import torch", "third parties here: numpy, pyarrow"),
        ("traces/reader.py", "from vllm_ula.kernels import x", "traces may import only"),
        ("replay/fit.py", "import vllm", "vllm is not visible"),
        ("logical_id.py", "import pyarrow", "third parties here: numpy"),
        ("helpers.py", "", "has no layer"),
    ],
)
def test_control_a_violation_is_found(tmp_path, path, source, expected):
    module = tmp_path / path
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(source)
    (found,) = violations(tmp_path)
    assert found.startswith(path)
    assert expected in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("step.py", "from vllm_ula.kernels.reference import gather"),
        ("__init__.py", "def f():\n    from vllm.config import KVTransferConfig"),
        ("__init__.py", "if TYPE_CHECKING:\n    from vllm.config import KVTransferConfig"),
        ("kernels/copy.py", "import triton\nfrom vllm_ula.errors import UlaError"),
        ("plugin.py", "import vllm\nfrom vllm_ula import patches, __version__"),
        ("traces/writer.py", "import numpy, pyarrow\nfrom vllm_ula.errors import UlaError"),
    ],
)
def test_control_what_is_allowed_is_not_found(tmp_path, path, source):
    module = tmp_path / path
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(source)
    assert violations(tmp_path) == []


# What a result must be is said once, for the suite and for the machine with a GPU.
SHARED = "tests.kernels.agreement"
# What an engine has beside kernels when it exchanges rows: measured as it is.
ENGINE_PARTS = ("vllm_ula.pools", "vllm_ula.streams")
GPU_BENCHMARKS = (
    "torch",
    "triton",
    "benchmarks.gpu",
    SHARED,
    *(f"vllm_ula.{peer}" for peer in PEERS["kernels"]),
    *ENGINE_PARTS,
)


def foreign(source: str) -> list[str]:
    """What a benchmark imports that a GPU machine without vLLM may lack."""
    names = [imported.name for imported in imports(source, "benchmarks.gpu")]
    return [
        name
        for name in names
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any((name + ".").startswith(allowed + ".") for allowed in GPU_BENCHMARKS)
    ]


def test_benchmarks_of_a_gpu_need_torch_and_triton_alone():
    files = sorted((ROOT / "benchmarks" / "gpu").glob("*.py"))
    assert files
    files.append(ROOT / f"{SHARED.replace('.', '/')}.py")
    assert {file.name: found for file in files if (found := foreign(file.read_text()))} == {}


def third_parties(module: str) -> set[str]:
    """Distributions that a module of vllm_ula needs, through other modules of it too."""
    found: set[str] = set()
    seen: set[str] = set()
    new = {module}
    while new:
        name = new.pop()
        path = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if name in seen or not path.exists():  # a module's attribute is no module
            continue
        seen.add(name)
        for imported in imports(path.read_text(), name.rpartition(".")[0]):
            top = imported.name.partition(".")[0]
            if top == "vllm_ula":
                new |= {imported.name, imported.name.rpartition(".")[0]}
            elif top not in sys.stdlib_module_names:
                found.add(top)
    return found


@pytest.mark.parametrize("module", ENGINE_PARTS)
def test_parts_of_an_engine_that_a_gpu_measures_need_torch_alone(module):
    assert third_parties(module) <= {"torch"}


def test_control_what_a_module_needs_through_others_is_found():
    assert third_parties("vllm_ula.step") >= {"numpy", "torch"}


@pytest.mark.parametrize("name", ["numpy", "benchmarks.arm", "vllm_ula.planner", "tqdm"])
def test_control_a_benchmark_that_needs_more_is_found(name):
    assert foreign(f"import torch, vllm_ula.kernels.translate\ndef f():\n    import {name}") == [
        name
    ]


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, vllm_ula; print(*{'torch', 'vllm', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", LINKS)
def test_links_mount_the_top_level_folders(name):
    link = PACKAGE / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", LINKS)
def test_mounted_folders_stay_namespace_portions(name):
    # A regular package called `kernels` on sys.path would hide the one transformers looks for.
    assert not (ROOT / name / "__init__.py").exists()
