"""Replacing Triton kernels on a CPU: also after numba has been imported."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from vllm_ula.compat import VERSIONS
from vllm_ula.patches.record import Patch


def _after_numba(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def rebind(overrides: Any) -> None:
        ffi = sys.modules.get("llvmlite.binding.ffi")
        if ffi is not None:
            ffi.lib._fntab["__dict__"] = {}  # a function, if anybody has asked before
        original(overrides)

    return rebind


def _needed() -> bool:
    """Whether vLLM still trips over an object that answers any attribute with a function."""
    from llvmlite.binding.ffi import _lib_wrapper
    from vllm.triton_utils.dispatcher import _rebind_kernels

    module = types.ModuleType("vllm_ula_probe")
    vars(module)["lib"] = _lib_wrapper()
    sys.modules[module.__name__] = module
    try:
        _rebind_kernels([])
    except AttributeError:
        return True
    finally:
        del sys.modules[module.__name__]
    return False


PATCHES = (
    Patch(
        target="vllm.triton_utils.dispatcher",
        attribute="_rebind_kernels",
        defined_in="vllm.triton_utils.dispatcher",
        parameters=("overrides",),
        replace=_after_numba,
        versions=VERSIONS,
        why="the second engine of a process looks through the attributes of all objects of all "
        "modules, and numba's binding to LLVM makes a function of any attribute, `__dict__` "
        "too: the start fails. Planners are compiled by numba. There is no hook",
        remove_when="_rebind_kernels skips objects whose vars() is no dict",
        needed=_needed,
    ),
)
