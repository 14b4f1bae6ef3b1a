"""Host rows and device rows trade places."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from vllm_ula.kernels import exchange as module
from vllm_ula.kernels.exchange import exchange
from vllm_ula.kernels.reference.exchange import exchange as reference
from vllm_ula.records import LayerRows

GARBAGE = (-1, 2**40, -(2**62))  # what a slot that does not count may hold


class Rows:
    """Layers of random bytes, and an exchange of some of their rows."""

    def __init__(self, cap, row_bytes=(656,), num_device=None, num_host=None, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        num_device = cap + 3 if num_device is None else num_device
        num_host = cap + 5 if num_host is None else num_host
        self.victims = torch.randperm(num_device, generator=self.generator)[:cap]
        self.vacated = torch.randperm(num_host, generator=self.generator)[:cap]
        self.fetch = self.bytes(cap) < 128
        self.write_back = self.bytes(cap) < 128
        self.layers = [
            LayerRows(f"layers.{i}", self.bytes(num_device, size), self.bytes(num_host, size))
            for i, size in enumerate(row_bytes)
        ]

    def bytes(self, *shape):
        return torch.randint(256, shape, dtype=torch.uint8, generator=self.generator)

    def after(self, run, num=None):
        """What the rows hold after an exchange of copies of them."""
        layers = [replace(x, device=x.device.clone(), host=x.host.clone()) for x in self.layers]
        run(self.victims, self.vacated, self.fetch, self.write_back, num, layers)
        return [rows for layer in layers for rows in (layer.device, layer.host)]

    def check(self, num=None):
        expected = self.after(reference, num)
        assert equal(self.after(exchange, num), expected)
        return expected


def equal(found, expected):
    """The comparison."""
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("cap", [0, 1, 2, 7, 8, 9, 100])
def test_equals_the_reference(cap):
    Rows(cap).check()


@pytest.mark.parametrize("row_bytes", [656, 1152, 2304, 24, 20, 6, 7, 1, 4096])
def test_rows_of_any_size(row_bytes):
    Rows(11, [row_bytes]).check()


def test_a_comparison_with_two_rows_swapped_is_red():
    rows = Rows(9)
    expected = rows.check()
    for tier in expected:
        tier[[0, 1]] = tier[[1, 0]]
        assert not equal(rows.after(exchange), expected)
        tier[[0, 1]] = tier[[1, 0]]


def test_entries_that_do_not_count_are_garbage_nobody_reads():
    rows = Rows(20, seed=1)
    for count in (0, 1, 8, 13, 20):
        for slots in (rows.victims, rows.vacated):
            slots[count:] = torch.tensor(GARBAGE).repeat(7)[: 20 - count]
        rows.fetch[count:] = rows.write_back[count:] = True
        rows.check(torch.tensor([count], dtype=torch.int32))
        rows = Rows(20, seed=count)


def test_no_more_entries_count_than_there_are():
    rows = Rows(5)
    found = rows.after(exchange, torch.tensor([1000], dtype=torch.int32))
    assert equal(found, rows.after(reference))


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("write_back", [True, False])
def test_only_what_is_fetched_or_written_back_changes(fetch, write_back):
    rows = Rows(9)
    rows.fetch[:], rows.write_back[:] = fetch, write_back
    device, host = rows.check()
    moved = rows.layers[0]
    assert (device != moved.device).any(1).sum() == 9 * fetch
    assert (host != moved.host).any(1).sum() == 9 * write_back


def test_the_whole_pool_changes_hands():
    rows = Rows(16, num_device=16, num_host=16)
    rows.fetch[:] = rows.write_back[:] = True
    device, host = rows.check()
    assert torch.equal(device[rows.victims], rows.layers[0].host[rows.vacated])
    assert torch.equal(host[rows.vacated], rows.layers[0].device[rows.victims])


def test_more_entries_than_the_programs_take_at_once():
    rows = Rows(40, [24, 24])
    with mock.patch.object(module, "MAX_PROGRAMS", 2), mock.patch.object(module, "TILE_WORDS", 64):
        rows.check()


@pytest.mark.parametrize(
    ("row_bytes", "launches"), [((656,) * 3, 1), ((656, 1152, 656, 24), 3), ((), 0)]
)
def test_one_launch_for_all_layers_of_one_size(row_bytes, launches):
    rows = Rows(5, row_bytes)
    kernel = mock.MagicMock()
    kernel.__getitem__.side_effect = module._exchange_kernel.__getitem__
    with mock.patch.object(module, "_exchange_kernel", kernel):
        rows.check()
    assert kernel.__getitem__.call_count == launches


def test_layers_of_different_types():
    rows = Rows(6, [1152, 2304])
    bf16, fp32 = rows.layers
    rows.layers = [
        replace(bf16, device=bf16.device.view(torch.bfloat16), host=bf16.host.view(torch.bfloat16)),
        replace(fp32, device=fp32.device.view(torch.int32), host=fp32.host.view(torch.int32)),
    ]
    expected = [rows.view(torch.uint8) for rows in rows.after(reference)]
    assert equal([rows.view(torch.uint8) for rows in rows.after(exchange)], expected)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_rows_that_start_anywhere(offset):
    rows = Rows(6, [656])
    layer = rows.layers[0]
    host = torch.empty(layer.host.numel() + offset, dtype=torch.uint8)[offset:]
    host = host.view_as(layer.host).copy_(layer.host)
    expected_device, expected_host = rows.after(reference)
    exchange(
        rows.victims,
        rows.vacated,
        rows.fetch,
        rows.write_back,
        None,
        [replace(layer, host=host)],
    )
    assert equal([layer.device, host], [expected_device, expected_host])


def test_rows_beyond_two_to_the_31_words():
    num_host = 2**33 // 656 + 100  # pages nobody touches take no memory
    host = torch.empty(num_host, 656, dtype=torch.uint8)
    rows = Rows(2)
    rows.vacated = torch.tensor([num_host - 1, 0])
    rows.fetch[:] = rows.write_back[:] = True
    top, device = rows.bytes(656), rows.layers[0].device
    host[-1], host[0] = top, 0
    down = device[rows.victims[0]].clone()
    exchange(
        rows.victims,
        rows.vacated,
        rows.fetch,
        rows.write_back,
        None,
        [replace(rows.layers[0], host=host)],
    )
    assert torch.equal(device[rows.victims[0]], top)
    assert torch.equal(host[-1], down)


def test_addresses_are_copied_once_for_each_set_of_layers():
    rows = Rows(3, [656, 656])
    args = rows.victims, rows.vacated, rows.fetch, rows.write_back, None
    module._table.cache_clear()
    for layers in (rows.layers, rows.layers[1:], rows.layers, rows.layers[::-1], rows.layers):
        exchange(*args, layers)
    assert (module._table.cache_info().misses, module._table.cache_info().hits) == (3, 2)


class TestRefusals:
    def refused(self, error, match, **changed):
        rows = Rows(3)
        args = {"victims": rows.victims, "vacated": rows.vacated, "fetch": rows.fetch}
        args |= {"write_back": rows.write_back, "num": None, "layers": rows.layers}
        with pytest.raises(error, match=match):
            exchange(**args | changed)

    def test_slots_and_flags(self):
        self.refused(TypeError, "victims is", victims=torch.zeros(3, dtype=torch.int32))
        self.refused(ValueError, "vacated has shape", vacated=torch.zeros(4, dtype=torch.int64))
        self.refused(TypeError, "fetch is", fetch=torch.zeros(3, dtype=torch.uint8))
        self.refused(ValueError, "write_back has", write_back=torch.zeros(2, dtype=torch.bool))
        self.refused(TypeError, "num is", num=torch.zeros(1, dtype=torch.int64))

    def test_rows(self):
        bytes_, wide = torch.zeros(9, 656, dtype=torch.uint8), torch.zeros(9, 1312).byte()
        for match, device, host in (
            ("layer: host is", bytes_, torch.zeros(9, 656)),
            ("layer: host has shape", bytes_, wide),
            ("layer: device is not contiguous", wide[:, ::2], bytes_),
            ("layer: host is not contiguous", bytes_, wide[:, ::2]),
        ):
            error = TypeError if host.is_floating_point() else ValueError
            self.refused(error, match, layers=[LayerRows("layer", device, host)])
        other = LayerRows("layer", bytes_, bytes_.to("meta"))
        self.refused(ValueError, "cpu and meta are not addressable from cpu", layers=[other])
