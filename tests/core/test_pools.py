import itertools
import subprocess
import sys

import pytest
import torch

from vllm_ula.errors import HostMemoryError
from vllm_ula.pools import HostPool

FLOAT8 = torch.float8_e4m3fn
LAYERS = [
    (24, torch.float32),
    (6, torch.bfloat16),
    (10, torch.float16),
    (5, torch.uint8),
    (3, FLOAT8),
]


def test_the_pool_is_exactly_what_was_asked_for():
    pool = HostPool(7, [row_bytes for row_bytes, _ in LAYERS])
    assert pool.nbytes == 7 * 48
    assert pool.rows(0, torch.uint8).untyped_storage().nbytes() == pool.nbytes
    pool.close()


def test_rows_of_all_layers_are_disjoint_and_cover_the_pool():
    pool = HostPool(7, [row_bytes for row_bytes, _ in LAYERS])
    rows = [pool.rows(i, dtype) for i, (_, dtype) in enumerate(LAYERS)]
    assert [tuple(r.shape) for r in rows] == [(7, 6), (7, 3), (7, 5), (7, 5), (7, 3)]
    assert [r.dtype for r in rows] == [dtype for _, dtype in LAYERS]
    assert all(r.is_contiguous() for r in rows)
    spans = [(r.data_ptr(), r.data_ptr() + r.nbytes) for r in rows]
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] - spans[0][0] == pool.nbytes
    pool.close()


def test_a_row_is_written_in_its_own_layer_only():
    pool = HostPool(4, [8, 8])
    first, second = pool.rows(0, torch.float32), pool.rows(1, torch.float32)
    first.fill_(torch.nan)
    second[2] = 5
    assert second.tolist() == [[0, 0], [0, 0], [5, 5], [0, 0]]
    assert first.isnan().all()


def test_without_host_rows_every_layer_is_empty():
    pool = HostPool(0, [24, 6])
    assert pool.nbytes == 0
    assert tuple(pool.rows(1, torch.bfloat16).shape) == (0, 3)
    pool.close()


def test_closing_twice_is_closing_once():
    pool = HostPool(4, [8])
    pool.close()
    pool.close()


@pytest.mark.parametrize("num_host", [2**52, 2**70])
def test_memory_there_is_not_is_refused_in_one_line(num_host):
    with pytest.raises(HostMemoryError) as refused:
        HostPool(num_host, [64])
    message = str(refused.value)
    assert f"{num_host * 64} bytes" in message
    assert message.endswith("lower host_gib")
    assert "\n" not in message


MEASURE = """
import os, resource, torch
from vllm_ula.pools import HostPool

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

HostPool(1 << 20, [8]).close()  # what the first use of threads and torch costs
rows = 192 * 1024 + 77
start = resident()
pool = HostPool(rows, [656, 8])
grown = resident()
print(pool.nbytes, grown - start, "/dev/shm" in open("/proc/self/maps").read())
view = pool.rows(0, torch.float32)[5]
pool.close()
view.fill_(1)  # rows still referenced stay mapped
print(float(view.sum()))
del view
print(resident() - start)
"""


def test_it_is_resident_at_once_and_released_when_closed():
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True, timeout=60
    )
    nbytes, grown, shared, total, left = done.stdout.split()
    slack = 8 << 20
    assert int(nbytes) == (192 * 1024 + 77) * 664
    assert abs(int(grown) - int(nbytes)) <= 0.02 * int(nbytes) + slack
    assert float(total) == 656 / 4
    assert int(left) <= slack
    assert shared == "False"  # the mapping is anonymous: a kill leaves no file
