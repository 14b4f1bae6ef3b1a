"""Host memory pinned for a GPU, with a runtime that writes down what it is asked."""

import contextlib
import gc
import mmap
import re
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_ula import pinned, pools
from vllm_ula.errors import HostMemoryError
from vllm_ula.pinned import Pinned, place
from vllm_ula.pools import HostPool

CHUNK = 2 * mmap.PAGESIZE


class FakeRuntime:
    """A GPU that sees host memory where it is, and what it was told in order."""

    def __init__(self, node=None, refuse_at=None, fail_unregister=()):
        self.node, self.refuse_at, self.fail_unregister = node, refuse_at, fail_unregister
        self.log = []
        self.registered = {}

    def numa_node(self):
        return self.node

    def register(self, address, nbytes):
        if len(self.registered) == self.refuse_at:
            raise RuntimeError("out of memory (2)")
        self.registered[address] = nbytes
        self.log.append(("register", address, nbytes))

    def unregister(self, address):
        del self.registered[address]
        self.log.append(("unregister", address))
        if address in self.fail_unregister:
            raise RuntimeError("an illegal memory access (700)")

    def view(self, memory):
        self.log.append(("view", memory.numel()))
        return memory[:]

    def synchronize(self):
        self.log.append(("synchronize",))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(pinned, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def make_pool(monkeypatch):
    """A pool on a GPU that is `runtime`."""

    def make(num_host, row_bytes, runtime):
        monkeypatch.setattr(pools, "CudaRuntime", lambda device: runtime)
        return HostPool(num_host, row_bytes, "cuda")

    return make


def numbered(num):
    return torch.arange(num).to(torch.uint8)


def test_the_default_chunk_is_a_multiple_of_every_page_size():
    assert (1 << 30) % mmap.PAGESIZE == (1 << 30) % (1 << 21) == 0


@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 17])
def test_chunks_follow_each_other_and_cover_the_memory(nbytes):
    runtime, memory = FakeRuntime(), numbered(nbytes)
    Pinned(memory, runtime)
    *chunks, (last, view) = runtime.log
    assert (last, view) == ("view", nbytes)
    expected = memory.data_ptr()
    for name, address, size in chunks:
        assert (name, address) == ("register", expected)
        assert 0 < size <= CHUNK
        expected += size
    assert expected == memory.data_ptr() + nbytes
    assert all(size == CHUNK for _, _, size in chunks[:-1])


def test_no_bytes_register_nothing(make_pool):
    runtime = FakeRuntime(node=1)
    pool = make_pool(0, [24, 6], runtime)
    assert tuple(pool.rows(1, torch.bfloat16).shape) == (0, 3)
    pool.close()
    assert runtime.log == [("view", 0)]
    assert pool.numa_node == 1


def test_chunks_are_released_last_first_once_kernels_are_done():
    runtime, memory = FakeRuntime(), numbered(3 * CHUNK)
    held = Pinned(memory, runtime)
    addresses = list(runtime.registered)
    runtime.log.clear()
    held.close()
    assert held.view.numel() == 0
    assert runtime.log == [("synchronize",), *(("unregister", a) for a in reversed(addresses))]
    held.close()
    assert len(runtime.log) == 4


def test_every_chunk_is_released_even_if_one_fails():
    runtime, memory = FakeRuntime(), numbered(3 * CHUNK)
    runtime.fail_unregister = {memory.data_ptr() + CHUNK}
    held = Pinned(memory, runtime)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        held.close()
    assert runtime.registered == {}
    held.close()


def test_every_chunk_is_released_even_if_a_kernel_failed_before(monkeypatch):
    runtime, memory = FakeRuntime(), numbered(2 * CHUNK)

    def synchronize():
        raise RuntimeError("unspecified launch failure (719)")

    held = Pinned(memory, runtime)
    monkeypatch.setattr(runtime, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        held.close()
    assert runtime.registered == {}


def test_the_third_chunk_refused_gives_the_first_two_back(monkeypatch):
    limits = [f"RLIMIT_MEMLOCK is {CHUNK} bytes", "the cgroup's memory limit is 3 bytes"]
    asked = []
    monkeypatch.setattr(pinned, "limits_below", lambda nbytes: asked.append(nbytes) or limits)
    runtime, memory = FakeRuntime(refuse_at=2), numbered(4 * CHUNK + 5)
    with pytest.raises(HostMemoryError) as refused:
        Pinned(memory, runtime)
    first, second = memory.data_ptr(), memory.data_ptr() + CHUNK
    assert runtime.log[2:] == [("synchronize",), ("unregister", second), ("unregister", first)]
    assert asked == [3 * CHUNK]
    message = str(refused.value)
    assert f"{2 * CHUNK} of {4 * CHUNK + 5} bytes (0.00 of 0.00 GiB) were pinned" in message
    assert "refused: out of memory (2); " + "; ".join(limits) in message
    assert message.endswith("lower host_gib")
    assert "\n" not in message


def test_memory_the_gpu_sees_elsewhere_is_given_back(monkeypatch):
    runtime, memory = FakeRuntime(), numbered(2 * CHUNK)

    def elsewhere(memory):
        raise RuntimeError("cuda:0 sees the memory at another address")

    monkeypatch.setattr(runtime, "view", elsewhere)
    monkeypatch.setattr(pinned, "limits_below", lambda nbytes: [])
    with pytest.raises(HostMemoryError, match=f"{2 * CHUNK} of {2 * CHUNK} .* another address"):
        Pinned(memory, runtime)
    assert runtime.registered == {}


def flags_of_memory(address):
    """What /proc says of the mapping an address is in; `dc`: not copied on fork."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("not mapped")


class TestPool:
    def test_rows_are_views_of_pinned_memory(self, make_pool):
        runtime = FakeRuntime()
        pool = make_pool(300, [656, 8], runtime)
        assert pool.nbytes == 300 * 664 == sum(runtime.registered.values())
        first, second = pool.rows(0, torch.float32), pool.rows(1, torch.uint8)
        assert first.data_ptr() == min(runtime.registered)
        assert second.data_ptr() == first.data_ptr() + 300 * 656
        assert not first.any()
        assert not second.any()
        pool.close()

    def test_memory_is_placed_before_it_is_touched_and_touched_before_it_is_pinned(
        self, make_pool, monkeypatch
    ):
        log = []
        runtime = FakeRuntime(node=3)
        runtime.log = log
        touch = HostPool._touch
        monkeypatch.setattr(pools, "place", lambda memory, node: log.append(("place", node)))
        monkeypatch.setattr(
            HostPool, "_touch", lambda pool, m: (log.append(("touch",)), touch(pool, m))
        )
        pool = make_pool(1, [16], runtime)
        assert [name for name, *_ in log] == ["place", "touch", "register", "view"]
        assert (pool.numa_node, log[0]) == (3, ("place", 3))
        pool.close()

    def test_it_is_unmapped_after_the_last_chunk_and_the_last_row(self, make_pool, monkeypatch):
        runtime, log = FakeRuntime(), []
        runtime.log = log
        map_memory = mmap.mmap

        class Mapping(map_memory):
            pass

        def mapped(*args, **kwargs):
            mapping = Mapping(*args, **kwargs)
            weakref.finalize(mapping, log.append, ("unmap",))
            return mapping

        monkeypatch.setattr(pools.mmap, "mmap", mapped)
        for held in (False, True):
            pool = make_pool(3 * CHUNK // 8, [8], runtime)
            rows = pool.rows(0, torch.uint8) if held else None
            log.clear()
            pool.close()
            gc.collect()
            names = ["synchronize", "unregister", "unregister", "unregister", "unmap"]
            assert [name for name, *_ in log] == names[: 4 if held else 5]
            del rows
            gc.collect()
            assert [name for name, *_ in log] == names
            pool.close()
            assert len(log) == 5

    def test_a_refused_pool_is_unmapped(self, make_pool):
        before = len(Path("/proc/self/maps").read_text().splitlines())
        with pytest.raises(HostMemoryError):
            make_pool(CHUNK, [64], FakeRuntime(refuse_at=2))
        gc.collect()
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 1

    def test_forks_do_not_copy_it(self, make_pool):
        pool, of_cpu = make_pool(CHUNK, [64], FakeRuntime()), HostPool(CHUNK, [64])
        assert "dc" in flags_of_memory(pool.rows(0, torch.uint8).data_ptr())
        assert "dc" not in flags_of_memory(of_cpu.rows(0, torch.uint8).data_ptr())
        pool.close()


class TestPlace:
    def test_the_pages_lie_on_the_node(self):
        memory = torch.frombuffer(mmap.mmap(-1, CHUNK), dtype=torch.uint8)
        if not place(memory, 0):
            pytest.skip("this system does not place memory")
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        (line,) = [x for x in lines if x.startswith(f"{memory.data_ptr():x} ")]
        assert line.split()[1] == "prefer:0"

    @pytest.mark.parametrize("node", [None, 1023])
    def test_an_unknown_node_changes_nothing(self, node):
        memory = torch.frombuffer(mmap.mmap(-1, CHUNK), dtype=torch.uint8)
        assert not place(memory, node)
        memory.zero_()

    def test_no_memory_has_no_place(self):
        assert not place(torch.empty(0, dtype=torch.uint8), 0)


class TestCuda:
    """The runtime of torch, as far as it goes without a GPU."""

    @pytest.fixture
    def runtime(self, monkeypatch, tmp_path):
        gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(pinned, "PCI_DEVICES", tmp_path)
        self.node = tmp_path / "0000:c1:02.0" / "numa_node"
        self.node.parent.mkdir()
        return pinned.CudaRuntime(torch.device("cuda"))

    @pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), (None, None)])
    def test_the_node_of_the_gpu(self, runtime, text, node):
        if text is not None:
            self.node.write_text(text)
        assert runtime.numa_node() == node

    def test_memory_is_mapped_and_portable_and_a_refusal_is_in_the_drivers_words(
        self, runtime, monkeypatch
    ):
        calls = []
        cudart = SimpleNamespace(
            cudaHostRegister=lambda *args: calls.append(args) or 0,
            cudaHostUnregister=lambda *args: calls.append(args) or 713,
            cudaGetErrorString=lambda status: f"error {status}",
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        assert runtime.device == torch.device("cuda", 5)
        runtime.register(4096, 100)
        with pytest.raises(RuntimeError, match=r"error 713 \(713\)"):
            runtime.unregister(4096)
        assert calls == [(4096, 100, 3), (4096,)]

    def test_a_view_that_is_a_copy_is_refused(self, runtime, monkeypatch):
        memory = numbered(8)
        given = []

        def as_tensor(data, device):
            given.append((data.__cuda_array_interface__, device))
            return made

        monkeypatch.setattr(torch, "as_tensor", as_tensor)
        made = memory[:]
        assert runtime.view(memory) is made
        interface, device = given[0]
        assert interface["data"] == (memory.data_ptr(), False)
        assert (interface["shape"], interface["typestr"]) == ((8,), "|u1")
        assert device == torch.device("cuda", 5)
        made = memory.clone()
        with pytest.raises(RuntimeError, match="cuda:5 sees the memory at another address"):
            runtime.view(memory)
