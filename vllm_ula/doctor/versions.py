"""Which distributions are here, and whether this vLLM is one UlaCache was written for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm_ula import __version__
from vllm_ula.doctor.check import Area, Check, Verdict
from vllm_ula.errors import VersionError

# Kernels run with Triton, actors with Ray; neither is needed on a CPU.
OPTIONAL = {"triton": "kernels need it on a GPU, which torch brings", "ray": "not used"}


def check_versions() -> Iterator[Check]:
    """vllm-ula, torch, vLLM, Triton and Ray."""
    yield Check(Area.VERSIONS, "vllm-ula", Verdict.FINE, __version__)
    yield _imported("torch", "it comes with vLLM: pip install 'vllm-ula[cuda]' or [cpu]")
    yield _vllm()
    for name, why in OPTIONAL.items():
        try:
            yield Check(Area.VERSIONS, name, Verdict.FINE, version(name))
        except PackageNotFoundError:
            yield Check(Area.VERSIONS, name, Verdict.NOTE, f"not installed; {why}")


def _imported(name: str, advice: str) -> Check:
    try:
        module: Any = importlib.import_module(name)
    except Exception as error:  # whatever a broken installation raises
        text = f"cannot be imported: {_line(error)}; {advice}"
        return Check(Area.VERSIONS, name, Verdict.PROBLEM, text)
    return Check(Area.VERSIONS, name, Verdict.FINE, str(module.__version__))


def _vllm() -> Check:
    found = _imported("vllm", "pip install 'vllm-ula[cuda]', or [cpu] for its CPU build")
    if found.verdict is Verdict.PROBLEM:
        return found
    try:
        from vllm_ula.compat import VERSIONS, check_version

        check_version(found.text)
    except VersionError as error:
        return Check(Area.VERSIONS, "vllm", Verdict.PROBLEM, f"{error}; install one of those")
    except ImportError as error:  # of torch, which is reported by itself
        return Check(Area.VERSIONS, "vllm", Verdict.PROBLEM, f"{found.text}: {_line(error)}")
    return Check(Area.VERSIONS, "vllm", Verdict.FINE, f"{found.text}, supported {VERSIONS}")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
