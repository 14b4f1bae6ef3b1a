"""A whole step, every operation in Triton, equals the step in torch on random histories."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch

from tests.core.rig import InKernels, Rig, Stepped
from vllm_ula.kernels import dispatch
from vllm_ula.kernels.dispatch import Kernels

BLOCK = 2
OPERATIONS = ("seat", "claim", "touch", "victims", "exchange", "remap", "bury", "scatter")


@contextmanager
def running(kernels: Kernels) -> Iterator[None]:
    """Whose kernels run meanwhile."""
    dispatch.use(kernels)
    try:
        yield
    finally:
        dispatch.use(Kernels.AUTO)


def random_step(random: Random, rig: Rig) -> dict[str, object]:
    """Arguments of `Rig.step`: reads what is live, writes anything."""
    num = rig.residency.num_logical
    write = random.sample(range(num), random.randrange(min(num, 6)))
    readable = sorted({*rig.truth, *write}) or [-1]
    flag = random.choice([lambda: True, lambda: False, lambda: random.random() < 0.6])
    tokens = range(random.randrange(4))
    return {
        "write": write,
        "select": [[random.choice([-1, *readable]) for _ in range(5)] for _ in tokens],
        "decode": [flag() for _ in tokens],
        "write_by_decode": [flag() for _ in write],
    }


def step(rig: Rig, kernels: Kernels, arguments: dict[str, object]) -> Stepped:
    with running(kernels):
        return rig.step(**arguments)  # type: ignore[arg-type]


def outcome(rig: Rig, called: Stepped) -> dict[str, object]:
    """What a step did, whatever the order of its rows."""
    return {
        "counts": called.counts,
        "incoming": called.incoming,
        "victims": called.victims,
        "fetched": called.fetched,
        "written back": called.written_back,
        "on the device": {
            slot for slot, home in enumerate(rig.homes) if home < rig.residency.num_device
        },
        "live": rig.residency.live.tolist(),
    }


@pytest.mark.parametrize(("num_device", "num_host"), [(2, 6), (7, 13), (12, 0), (24, 40)])
def test_equals_the_step_in_torch_from_the_same_state(num_device: int, num_host: int) -> None:
    """`Rig.step` also reads back every row that it selects, of every layer."""
    random = Random(num_device)
    rig = Rig(lambda num: InKernels(num, 4), num_device, num_host, 2, BLOCK)
    for _ in range(25):
        arguments, other = random_step(random, rig), copy.deepcopy(rig)
        expected = outcome(other, step(other, Kernels.TORCH, arguments))
        assert outcome(rig, step(rig, Kernels.TRITON, arguments)) == expected
        if random.random() < 0.3:
            with running(Kernels.TRITON):
                rig.die(random.sample(range((num_device + num_host) // BLOCK), 1))


def test_every_operation_of_a_step_ran_as_triton() -> None:
    rig = Rig(InKernels, 4, 8, 1, BLOCK)
    dispatch.calls.clear()
    with running(Kernels.TRITON):
        rig.fill(range(12))
        rig.step(select=[[8, 9]])
        rig.die([1])
    assert {name for name, kernels in dispatch.calls if kernels is Kernels.TRITON} >= {*OPERATIONS}
    assert not [name for name, kernels in dispatch.calls if kernels is Kernels.TORCH]


def test_control_two_swapped_rows_are_seen() -> None:
    rig = Rig(InKernels, 4, 8, 1, BLOCK)
    with running(Kernels.TRITON):
        rig.fill(range(12))
    rows = rig.layers[0].host
    rows[[0, 1]] = rows[[1, 0]]
    assert rig.wrong_rows(torch.arange(12)) != []
