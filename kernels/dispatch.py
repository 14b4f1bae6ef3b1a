"""Which implementation of an operation runs: Triton on GPUs, torch on CPUs.

Call operations from here, `dispatch.gather(...)`: each has the name and signature of its torch
reference, `reference/<file>.py`, and of its Triton launcher, `<file>.py`, which is imported when it
is first needed. The device of the first argument decides; `use` overrules it.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from vllm_ula.kernels.reference.bury import bury as _bury
from vllm_ula.kernels.reference.claim import claim as _claim
from vllm_ula.kernels.reference.exchange import exchange as _exchange
from vllm_ula.kernels.reference.gather import gather as _gather
from vllm_ula.kernels.reference.index_keys import store_index_keys as _store_index_keys
from vllm_ula.kernels.reference.index_scores import index_scores as _index_scores
from vllm_ula.kernels.reference.logical_slots import logical_slots as _logical_slots
from vllm_ula.kernels.reference.remap import remap as _remap
from vllm_ula.kernels.reference.scatter import scatter as _scatter
from vllm_ula.kernels.reference.seat import seat as _seat
from vllm_ula.kernels.reference.sparse_mla import sparse_mla as _sparse_mla
from vllm_ula.kernels.reference.topk import topk as _topk
from vllm_ula.kernels.reference.touch import touch as _touch
from vllm_ula.kernels.reference.translate import translate as _translate
from vllm_ula.kernels.reference.victims import victims as _victims
from vllm_ula.kernels.tables import MapTables

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


def uses_triton(device: torch.device) -> bool:
    """Whether operations on this device run as Triton kernels."""
    return device.type != "cpu" if _used is Kernels.AUTO else _used is Kernels.TRITON


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
        kernels = Kernels.TRITON if uses_triton(_device(args[0])) else Kernels.TORCH
        calls[name, kernels] += 1
        run = reference if kernels is Kernels.TORCH else launcher(name)
        return run(*args, **kwargs)  # type: ignore[return-value]

    return operation


def _device(first: object) -> torch.device:
    tensor = first.home if isinstance(first, MapTables) else first
    assert isinstance(tensor, Tensor)
    return tensor.device


logical_slots = _operation(_logical_slots)
translate = _operation(_translate)
seat = _operation(_seat)
claim = _operation(_claim)
touch = _operation(_touch)
victims = _operation(_victims)
exchange = _operation(_exchange)
remap = _operation(_remap)
bury = _operation(_bury)
scatter = _operation(_scatter)
gather = _operation(_gather)
sparse_mla = _operation(_sparse_mla)
store_index_keys = _operation(_store_index_keys)
index_scores = _operation(_index_scores)
topk = _operation(_topk)
