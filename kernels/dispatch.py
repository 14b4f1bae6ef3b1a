"""Which implementation of an operation runs: Triton on GPUs, torch on CPUs.

Call operations from here, `dispatch.gather(...)`: each has the name and signature of its torch
reference, `reference/<file>.py`, and of its Triton launcher, `<file>.py`, which is imported when it
is first needed. The device of the first tensor among the arguments decides; `use` overrules it.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import ParamSpec, TypeVar

from torch import Tensor

from vllm_ula.kernels.reference.index_keys import store_index_keys as _store_index_keys
from vllm_ula.kernels.reference.index_scores import index_scores as _index_scores
from vllm_ula.kernels.reference.logical_slots import logical_slots as _logical_slots
from vllm_ula.kernels.reference.topk import topk as _topk
from vllm_ula.kernels.reference.translate import translate as _translate

P = ParamSpec("P")
T = TypeVar("T")


class Kernels(Enum):
    """Whose kernels run."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


calls: Counter[tuple[str, Kernels]] = Counter()
"""How often each operation ran since the process started, by whose kernel."""

references: dict[str, Callable[..., object]] = {}
"""The torch reference of every operation, by the operation's name."""

_used = Kernels.AUTO


def use(kernels: Kernels) -> None:
    """Run these kernels from now on; on a CPU Triton runs in its interpreter, for tests."""
    global _used
    _used = kernels


def uses_triton(tensor: Tensor) -> bool:
    """Whether operations on this tensor run as Triton kernels."""
    return tensor.is_cuda if _used is Kernels.AUTO else _used is Kernels.TRITON


@functools.cache
def launcher(name: str) -> Callable[..., object]:
    """The Triton launcher of an operation."""
    reference = references[name]
    file = reference.__module__.rpartition(".")[2]
    module = importlib.import_module(f"vllm_ula.kernels.{file}")
    found: Callable[..., object] = getattr(module, reference.__name__)
    return found


def _operation(reference: Callable[P, T]) -> Callable[P, T]:
    name = reference.__name__
    references[name] = reference

    @functools.wraps(reference)
    def operation(*args: P.args, **kwargs: P.kwargs) -> T:
        kernels = Kernels.TRITON if uses_triton(_first_tensor(args)) else Kernels.TORCH
        calls[name, kernels] += 1
        run = reference if kernels is Kernels.TORCH else launcher(name)
        return run(*args, **kwargs)  # type: ignore[return-value]

    return operation


def _first_tensor(args: tuple[object, ...]) -> Tensor:
    return next(arg for arg in args if isinstance(arg, Tensor))


index_scores = _operation(_index_scores)
logical_slots = _operation(_logical_slots)
store_index_keys = _operation(_store_index_keys)
topk = _operation(_topk)
translate = _operation(_translate)
