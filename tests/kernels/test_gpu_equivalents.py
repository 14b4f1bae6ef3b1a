"""What torch does instead of a kernel gives the same: its times are those of the same work."""

import pytest
import torch

from benchmarks.gpu import equivalents
from benchmarks.gpu.bench import BLOCK_SIZE, DRY, Bench, block_table
from benchmarks.gpu.rows import as_bf16, copied, some_homes, values
from benchmarks.gpu.timing import Timer
from vllm_ula.kernels.reference.exchange import exchange
from vllm_ula.kernels.reference.gather import gather
from vllm_ula.kernels.reference.index_keys import store_index_keys
from vllm_ula.kernels.reference.index_scores import index_scores
from vllm_ula.kernels.reference.scatter import scatter
from vllm_ula.kernels.reference.sparse_mla import sparse_mla
from vllm_ula.records import LayerRows


@pytest.fixture(scope="module")
def bench():
    bench = Bench(torch.device("cpu"), DRY, Timer(dry=True))
    yield bench
    bench.close()


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def selection(bench, missing, as_kind=lambda rows: rows):
    """Pools, homes, and which of them are on the host."""
    device, host = (as_kind(rows) for rows in (bench.layers[0].device, bench.layers[0].host))
    homes = some_homes((3, 20), device, host, missing, bench.generator(0))
    on_host = homes >= len(device)
    assert (on_host.sum(1) == missing).all()
    return device, host, homes, on_host.flatten().nonzero().squeeze(1)


@pytest.mark.parametrize("missing", [0, 6])
@pytest.mark.parametrize("as_kind", [copied, as_bf16])
def test_gather(bench, missing, as_kind):
    device, host, homes, told = selection(bench, missing, as_kind)
    found, expected = equivalents.gather(device, host, homes, told), gather(device, host, homes)
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_scatter(bench):
    homes, rows = torch.randperm(DRY.rows)[:9], values(9, bench.generator(1))
    pools = [copied(bench.device_rows[0]) for _ in range(2)]
    equivalents.scatter(pools[0], homes, rows)
    scatter(pools[1], pools[1][:0], homes, rows)
    assert torch.equal(*pools)
    assert not torch.equal(pools[0], bench.device_rows[0])


def test_exchange(bench):
    num = 13
    victims, vacated = torch.randperm(DRY.rows)[:num], torch.randperm(DRY.slots - DRY.rows)[:num]
    ours, expected = (
        [LayerRows(layer.name, copied(layer.device), copied(layer.host)) for layer in bench.layers]
        for _ in range(2)
    )
    equivalents.exchange(ours, victims, vacated, None)
    every = torch.ones(num, dtype=torch.bool)
    exchange(victims, vacated, every, every, None, expected)
    for one, other, before in zip(ours, expected, bench.layers, strict=True):
        assert torch.equal(one.device, other.device)
        assert torch.equal(one.host, other.host)
        assert not torch.equal(one.host, before.host)


@pytest.mark.parametrize("run", [equivalents.attention, equivalents.fused_attention])
@pytest.mark.parametrize("missing", [0, 6])
def test_attention(bench, draw, run, missing):
    device, host, homes, told = selection(bench, missing)
    queries, scale = draw(3, 4, 576).bfloat16(), 576**-0.5
    found = run(queries, device, host, homes, scale, told)
    expected, _ = sparse_mla(queries, device, host, homes, scale, 512)
    assert found.shape == expected.shape
    # Logits of 2 at most are rounded to 8 bits, and so are weights and sums.
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.01)


def test_store_index_keys(draw):
    caches = [torch.zeros(50, 132, dtype=torch.uint8) for _ in range(2)]
    slots, keys = torch.randperm(50)[:9], draw(9, 128).bfloat16()
    equivalents.store_index_keys(caches[0], slots, keys)
    store_index_keys(caches[1], slots, keys)
    assert torch.equal(*caches)
    assert caches[0].any(1).sum() == 9


def test_index_scores(bench, draw):
    requests, heads = DRY.requests[0], 4
    table, width = block_table(bench, requests), DRY.slots // requests
    cache = torch.empty(DRY.slots, 132, dtype=torch.uint8)
    store_index_keys(cache, torch.arange(DRY.slots), draw(DRY.slots, 128))
    queries, weights = draw(requests, heads, 128).to(torch.float8_e4m3fn), draw(requests, heads)
    found = equivalents.index_scores(queries, weights, cache, table, BLOCK_SIZE)
    last = torch.full((requests,), width - 1)
    expected = index_scores(
        queries, weights, cache, table, torch.arange(requests), last, BLOCK_SIZE, width
    )
    assert found.shape == expected.shape
    assert ((found - expected).abs() < 0.02 * expected.abs().max()).all()
