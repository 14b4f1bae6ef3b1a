"""Attention over rows where they live.

The interpreter multiplies in float32, so the kernel is within rounding of the float32 reference on
rows of every kind. Tensor cores round queries and weights to the 8 bits of bf16 (11 of fp16).
"""

import pytest
import torch

from tests.kernels import pools
from vllm_ula.kernels import sparse_mla as kernel
from vllm_ula.kernels.reference.sparse_mla import sparse_mla as reference
from vllm_ula.kernels.sparse_mla import sparse_mla

SCALE = 576**-0.5
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def assert_equals_the_reference(queries, device, host, homes, scale=SCALE, latent=512):
    expected = reference(queries, device, host, homes, scale, latent)
    found = sparse_mla(queries, device, host, homes, scale, latent)
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, **TOLERANCE)
    staged = sparse_mla(queries, device, host, homes, scale, latent, staged=True)
    assert all(torch.equal(a, b) for a, b in zip(staged, found, strict=True))
    return found


@pytest.mark.parametrize("kind", pools.DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "topk"), [(2, 4, 50), (1, 3, 64), (1, 16, 31)])
def test_equals_the_reference_and_staging_changes_no_bit(random, kind, tokens, heads, topk):
    device, host = pools.make(kind, 40, 30)
    homes = pools.homes(tokens, topk, num=70)
    assert_equals_the_reference(random(tokens, heads, 576), device, host, homes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_queries_of_any_float_type(random, dtype):
    device, host = pools.make("bf16", 20, 20)
    homes = pools.homes(2, 40, num=40)
    assert_equals_the_reference(random(2, 4, 576).to(dtype), device, host, homes)


@pytest.mark.parametrize("heads", [1, 17, 33])
def test_heads_that_fill_no_group(random, heads):
    device, host = pools.make("fp8", 20, 20)
    assert_equals_the_reference(
        random(2, heads, 576), device, host, pools.homes(2, 20, num=40, seed=heads)
    )


@pytest.mark.parametrize("topk", [1, 32, 63, 64, 65, 128, 140])
def test_selections_of_one_and_of_several_splits(random, monkeypatch, topk):
    monkeypatch.setattr(kernel, "SPLIT", 64)
    device, host = pools.make("fp32", 70, 50, 24)
    homes = pools.homes(2, topk, num=120, seed=topk)
    assert_equals_the_reference(random(2, 3, 24), device, host, homes, 0.3, 16)


def test_a_selection_wider_than_a_split(random):
    device, host = pools.make("fp8", 400, 300)
    homes = pools.homes(1, kernel.SPLIT + 1, num=700)
    assert_equals_the_reference(random(1, 3, 576), device, host, homes)


@pytest.mark.parametrize(("width", "latent"), [(12, 8), (9, 5), (64, 64), (80, 32)])
def test_rows_of_any_width(random, width, latent):
    device, host = pools.make("fp32", 20, 20, width)
    homes = pools.homes(3, 21, num=40)
    assert_equals_the_reference(random(3, 5, width), device, host, homes, 0.3, latent)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("tier", ["device", "host", "mixed", "no host rows"])
def test_rows_of_one_tier_and_of_both(random, kind, tier):
    device, host = pools.make(kind, 40, 40)
    homes = torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(1, 40)
    if tier == "no host rows":
        host = host[:0]
    homes = homes + {"host": 40, "mixed": 20}.get(tier, 0)
    assert_equals_the_reference(random(1, 4, 576), device, host, homes)


def test_an_empty_selection_gives_zero_and_minus_infinity(random, monkeypatch):
    monkeypatch.setattr(kernel, "SPLIT", 64)
    device, host = pools.make("bf16", 40, 30)
    homes = pools.homes(4, 80, num=70)
    homes[0], homes[2, :64], homes[3, 1:] = -1, -1, -1  # nothing, one split of two, one row
    homes[3, 0] = 7
    out, lse = assert_equals_the_reference(random(4, 3, 576), device, host, homes)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    torch.testing.assert_close(out[3], device[7, :512].float().expand(3, 512), **TOLERANCE)


@pytest.mark.parametrize(("tokens", "heads", "topk"), [(0, 4, 8), (2, 4, 0), (0, 4, 0), (2, 0, 8)])
def test_nothing_to_attend(random, tokens, heads, topk):
    device, host = pools.make("bf16", 8, 0)
    homes = torch.zeros(tokens, topk, dtype=torch.int64)
    for staged in (False, True):
        queries = random(tokens, heads, 576)
        out, lse = sparse_mla(queries, device, host, homes, SCALE, 512, staged)
        assert (tuple(out.shape), tuple(lse.shape)) == ((tokens, heads, 512), (tokens, heads))
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_a_row_selected_twice_counts_twice(random):
    device, host = pools.make("fp32", 4, 4)
    homes = torch.tensor([[1, 6, 6, -1, 1, 6]])
    _, lse = assert_equals_the_reference(random(1, 3, 576), device, host, homes)
    once = torch.tensor([[1, 6]])
    assert not torch.equal(lse, sparse_mla(random(1, 3, 576), device, host, once, SCALE, 512)[1])


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
def test_rows_nobody_selects_reach_nothing(random, kind, staged):
    device, host = pools.make(kind, 20, 20)
    homes = pools.homes(3, 10, num=40)
    homes[0], homes[1, :4] = -1, -1
    queries = random(3, 4, 576)
    clean = sparse_mla(queries, device, host, homes, SCALE, 512, staged)
    pools.poison(device, host, homes)
    again = sparse_mla(queries, device, host, homes, SCALE, 512, staged)
    assert all(torch.equal(a, b) for a, b in zip(again, clean, strict=True))
    assert not torch.cat([a.flatten() for a in again]).isnan().any()


@pytest.mark.parametrize("staged", [False, True])
def test_a_token_has_the_same_bits_alone_and_in_chunks_of_any_size(random, monkeypatch, staged):
    device, host = pools.make("fp8", 20, 20)
    queries, homes = random(4, 3, 576), pools.homes(4, 20, num=40)
    together = sparse_mla(queries, device, host, homes, SCALE, 512, staged)
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 60_000 if staged else 13_000)  # two tokens
    chunks = sparse_mla(queries, device, host, homes, SCALE, 512, staged)
    assert all(torch.equal(a, b) for a, b in zip(chunks, together, strict=True))
    for t in range(4):
        part = slice(t, t + 1)
        alone = sparse_mla(queries[part], device, host, homes[part], SCALE, 512, staged)
        assert all(torch.equal(a, b[part]) for a, b in zip(alone, together, strict=True))


def test_moving_a_row_changes_no_bit(random):
    device, host = pools.make("bf16", 20, 20)
    queries, homes = random(2, 4, 576), pools.homes(2, 30, num=40)
    before = sparse_mla(queries, device, host, homes, SCALE, 512)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    both = torch.cat((device, host))[order]
    moved = torch.where(homes < 0, -1, order.argsort()[homes])
    after = sparse_mla(queries, both[:20].clone(), both[20:].clone(), moved, SCALE, 512)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_large_logits_do_not_overflow(random):
    device, host = pools.make("fp32", 20, 20)
    queries, homes = 1e3 * random(1, 3, 576), pools.homes(1, 40, num=40)
    out, lse = sparse_mla(queries, device, host, homes, 1.0, 512)
    expected, expected_lse = reference(queries, device, host, homes, 1.0, 512)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse)


def test_control_two_rows_swapped_are_seen(random):
    device, host = pools.make("bf16", 20, 20)
    queries = random(1, 3, 576)
    right = torch.tensor([[0, 5, 22, 30]])
    out, _ = reference(queries, device, host, right, SCALE, 512)
    device[5], device[6] = device[6].clone(), device[5].clone()
    found, _ = sparse_mla(queries, device, host, right, SCALE, 512)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, out, **TOLERANCE)


def test_rows_beyond_two_to_the_31_elements(random):
    num = 2**31 // 656 + 3
    device, host = pools.huge("fp8", num, 656), pools.huge("fp8", num, 656)
    few, _ = pools.make("fp8", 2, 0)
    device[-1], host[-1] = few[0], few[1]
    queries = random(1, 3, 576)
    found = sparse_mla(queries, device, host, torch.tensor([[num - 1, 2 * num - 1]]), SCALE, 512)
    expected = sparse_mla(queries, few, few[:0], torch.tensor([[0, 1]]), SCALE, 512)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_a_kernel_would_misread_is_refused(random):
    device, host = pools.make("fp8", 4, 4)
    homes = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"queries has shape \(2, 3, 656\), expected \(2, 3, 576"):
        sparse_mla(random(2, 3, 656), device, host, homes, SCALE, 512)
    with pytest.raises(ValueError, match="latent is 256"):
        sparse_mla(random(2, 3, 576), device, host, homes, SCALE, 256)
    with pytest.raises(ValueError, match=r"homes has shape \(2, 3\), expected \(1, 3\)"):
        sparse_mla(random(1, 3, 576), device, host, homes, SCALE, 512)
