"""How calls are planned, by where maps live and by the settings."""

import pytest
import torch

from vllm_ula.config import UlaConfig
from vllm_ula.errors import ConfigError
from vllm_ula.kernels import dispatch
from vllm_ula.map_bytes import map_bytes
from vllm_ula.planner import BucketAge
from vllm_ula.planning.compiled import CompiledPlanning
from vllm_ula.planning.kernels import KernelPlanning
from vllm_ula.planning.make import check_planner, planning_maker, plans_with_kernels

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "_used", dispatch.Kernels.TRITON)


def test_on_a_cpu_planning_is_compiled_and_domains_share_scratch():
    assert not plans_with_kernels(CPU)
    make = planning_maker(UlaConfig(), 16, 32, CPU)
    first, second = make(), make()
    assert isinstance(first, CompiledPlanning)
    assert isinstance(second, CompiledPlanning)
    assert first.scratch is second.scratch
    assert first.residency is not second.residency


def test_in_triton_operations_plan_and_domains_share_marks(in_triton):
    assert plans_with_kernels(CPU)
    make = planning_maker(UlaConfig(recency_buckets=8, bucket_age="touched"), 16, 32, CPU)
    first, second = make(), make()
    assert isinstance(first, KernelPlanning)
    assert isinstance(second, KernelPlanning)
    assert first.bucket_age is BucketAge.TOUCHED
    assert first.tables.edges.numel() == 8
    assert first.tables.marks is second.tables.marks
    assert first.tables.stamp is not second.tables.stamp


def test_maps_on_a_gpu_are_planned_there_whosever_kernels_run(monkeypatch):
    for kernels in dispatch.Kernels:
        monkeypatch.setattr(dispatch, "_used", kernels)
        assert plans_with_kernels(GPU)


def test_what_is_charged_is_what_tables_take(in_triton):
    num_device, num_host = 64, 192
    mine = planning_maker(UlaConfig(), num_device, num_host, CPU)().tables
    charged = map_bytes("pb_lru", with_kernels=True)
    num_logical = num_device + num_host
    assert mine.home.nbytes + mine.live.nbytes == charged.logical * num_logical
    assert mine.owner.nbytes + mine.stamp.nbytes == charged.device * num_device
    assert mine.marks.nbytes + mine.roles.nbytes == charged.scratch * num_logical


@pytest.mark.parametrize("planner", ["timestamp_lru", "hash_lru"])
def test_a_planner_of_the_cpu_is_refused_where_kernels_plan(planner):
    with pytest.raises(ConfigError, match=rf"^planner={planner}: .*; use pb_lru$"):
        check_planner(UlaConfig(planner=planner), GPU)
    check_planner(UlaConfig(planner=planner), CPU)


def test_more_buckets_than_kernels_tell_apart_are_refused():
    with pytest.raises(ConfigError, match=r"^recency_buckets=257: .* 256 .*; use 256$"):
        check_planner(UlaConfig(recency_buckets=257), GPU)
    check_planner(UlaConfig(recency_buckets=256), GPU)
    check_planner(UlaConfig(recency_buckets=4096), CPU)
