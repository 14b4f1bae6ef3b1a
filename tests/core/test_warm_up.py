"""The first request does not pay for compilation."""

import subprocess
import sys

import pytest

from vllm_ula.planner import hash_lru, queues, stamps, timestamp_lru
from vllm_ula.planning import compiled

# In a process of its own: other tests have compiled what warm_up may leave out.
STORY = """
import sys
import torch
from tests.core.rig import Rig
from vllm_ula.config import UlaConfig
from vllm_ula.planner import hash_lru, pb_lru, queues, stamps, timestamp_lru
from vllm_ula.planner.make import make_planner
from vllm_ula.planning import compiled

settings = UlaConfig(planner=sys.argv[1])
compiled.warm_up(make_planner(settings, 64))

def num_compiled():
    modules = (compiled, hash_lru, pb_lru, queues, stamps, timestamp_lru)
    functions = {f for m in modules for f in vars(m).values() if hasattr(f, "signatures")}
    return {f.__name__: len(f.signatures) for f in functions}

before = num_compiled()
rig = Rig(lambda num: make_planner(settings, num), 16, 48, num_layers=2, block_size=4)
rig.fill(range(64))
for number in range(80):
    rows = [(7 * number + 3 * i) % 64 for i in range(5)]
    rig.step(write=[number % 64], select=[rows, rows[::-1]])  # a decode step
    rig.step(select=[list(range(64))] * 3)  # more than fits
    rig.step(write=rows, select=[rows] * 4, decode=False)  # prefill
    rig.step()
    if number % 5 == 0:
        rig.die([number % 16])
        rig.fill(range(number % 16 * 4, number % 16 * 4 + 4))
after = num_compiled()
assert after == before, {name: (before[name], num) for name, num in after.items()}
assert sum(before.values()) >= 8
"""


def test_flags_are_the_same_in_every_file():
    """numba keeps what it has compiled until the file of the function changes."""
    modules = (compiled, hash_lru, queues, timestamp_lru)
    assert {module.DEAD for module in modules} == {stamps.DEAD}
    assert not queues.TAKEN & (stamps.DEAD | stamps.STACKED)


@pytest.mark.parametrize("planner", ["pb_lru", "timestamp_lru", "hash_lru"])
def test_serving_compiles_nothing_that_warm_up_has_not(planner):
    subprocess.run([sys.executable, "-c", STORY, planner], check=True)
