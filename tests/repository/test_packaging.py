"""What an installed vllm-ula consists of."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_ula._version import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without leaving anything in the checkout."""
    tmp = tmp_path_factory.mktemp("wheel")
    command = f"egg_info -e {tmp} build -b {tmp}/build bdist_wheel -b {tmp}/wheel -d {tmp}/dist"
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command.split()], cwd=ROOT, check=True, timeout=120
    )
    (path,) = (tmp / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_module_under_vllm_ula(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        f"vllm_ula/{folder}{path.relative_to(ROOT / mounted)}"
        for mounted, folder in (
            ("vllm_ula", ""),
            ("connectors", "connectors/"),
            ("kernels", "kernels/"),
            ("patches", "patches/"),
        )
        for path in (ROOT / mounted).rglob("*.py")
    }
    assert names == sources | {"vllm_ula/py.typed"}


def test_wheel_is_of_this_version_and_names_its_entry_points(wheel):
    dist_info = f"vllm_ula-{__version__}.dist-info"
    assert wheel.read(f"{dist_info}/entry_points.txt").decode().split("\n") == [
        "[console_scripts]",
        "vllm-ula = vllm_ula.cli:main",
        "",
        "[vllm.general_plugins]",
        "vllm_ula = vllm_ula.plugin:register",
        "",
    ]
