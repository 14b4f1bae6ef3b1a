"""What keeps this process from taking host memory."""

import pytest

from vllm_ula import host_memory


class Limits:
    """What the system says: bytes that may be locked, and the files of a cgroup."""

    locked = 1 << 20

    def __init__(self, folder):
        self.max, self.used = folder / "memory.max", folder / "memory.current"
        self.max.write_text("4000000\n")
        self.used.write_text("1000\n")


@pytest.fixture
def limits(monkeypatch, tmp_path):
    limits = Limits(tmp_path)
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda which: (limits.locked, -1))
    monkeypatch.setattr(host_memory, "CGROUPS", ((str(limits.max), str(limits.used)),))
    return limits


def test_what_is_below_is_named_with_its_figure(limits):
    assert host_memory.limits_below(1 << 20) == []
    memlock = "RLIMIT_MEMLOCK is 1048576 bytes (0.00 GiB)"
    cgroup = "the cgroup's memory limit is 4000000 bytes (0.00 GiB)"
    assert host_memory.limits_below((1 << 20) + 1) == [memlock]
    assert host_memory.limits_below(1 << 30) == [memlock, cgroup]


def test_no_limit_is_none(limits):
    limits.locked = host_memory.resource.RLIM_INFINITY
    limits.max.write_text("max\n")
    assert host_memory.limits_below(1 << 60) == []


def test_what_a_cgroup_leaves_is_available(limits):
    assert host_memory.available_host_bytes() == 3999000
