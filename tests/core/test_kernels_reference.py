"""The torch references: obvious, and held to something more obvious still."""

import math
from typing import ClassVar

import pytest
import torch

from vllm_ula.kernels.reference import fp8, fp8_rows
from vllm_ula.kernels.reference.exchange import exchange
from vllm_ula.kernels.reference.gather import gather
from vllm_ula.kernels.reference.index_keys import load, store_index_keys
from vllm_ula.kernels.reference.index_scores import index_scores
from vllm_ula.kernels.reference.logical_slots import logical_slots
from vllm_ula.kernels.reference.scatter import scatter
from vllm_ula.kernels.reference.sparse_mla import sparse_mla
from vllm_ula.kernels.reference.topk import topk
from vllm_ula.records import LayerRows

NAN = torch.nan


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def slots(*index):
    return torch.tensor(index, dtype=torch.int64)


class TestLogicalSlots:
    table = torch.tensor([[3, 5], [7, 1]], dtype=torch.int32)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_positions_go_through_the_block_table_of_their_request(self, dtype):
        positions = torch.tensor([[0, 3, 4, 7], [0, 3, 4, 7], [6, -1, 1, -1]], dtype=dtype)
        found = logical_slots(positions, slots(0, 1, 0), self.table, 4)
        assert found.dtype == torch.int64
        assert found.tolist() == [[12, 15, 20, 23], [28, 31, 4, 7], [22, -1, 13, -1]]

    def test_a_padding_token_selects_nothing_whatever_its_positions(self):
        positions = torch.tensor([[1, 10_000, 2**31 - 1], [1, -1, -1]], dtype=torch.int32)
        found = logical_slots(positions, slots(-1, 1), self.table, 4)
        assert found.tolist() == [[-1, -1, -1], [29, -1, -1]]

    def test_large_block_ids_do_not_overflow(self):
        table = torch.tensor([[2**30]], dtype=torch.int32)
        positions = torch.zeros(1, 1, dtype=torch.int32)
        assert logical_slots(positions, slots(0), table, 64).item() == 2**36

    def test_no_tokens(self):
        assert logical_slots(torch.empty(0, 3), slots(), self.table, 4).shape == (0, 3)


class TestIndexKeys:
    @staticmethod
    def smallest_scale(largest):
        """Smallest power of two s with largest <= 448 s, from the exact binary fraction."""
        mantissa, exponent = math.frexp(largest)  # 448 = 0.875 * 2**9
        return math.ldexp(1.0, exponent - 9 + (mantissa > 0.875))

    @pytest.mark.parametrize("base", [1.0, 448.0])
    @pytest.mark.parametrize("ulps", range(-3, 4))
    def test_scale_is_exact_around_powers_of_two_and_around_the_largest_value(self, base, ulps):
        largest = torch.tensor([math.ldexp(base, n) for n in range(-30, 60)], dtype=torch.float32)
        largest = (largest.view(torch.int32) + ulps).view(torch.float32)
        expected = [self.smallest_scale(x) for x in largest.tolist()]
        assert fp8.power_of_two_scale(largest.unsqueeze(1)).flatten().tolist() == expected

    def test_scale_of_random_rows(self, random):
        rows = random(500, 16) * 10 ** (2 * random(500, 1))
        expected = [self.smallest_scale(x) for x in rows.abs().amax(1).tolist()]
        assert fp8.power_of_two_scale(rows).flatten().tolist() == expected

    def test_scale_of_zeros_is_that_of_the_smallest_magnitude(self):
        scale = fp8.power_of_two_scale(torch.zeros(1, 8)).item()
        assert scale == self.smallest_scale(torch.tensor(1e-10).item())

    def test_quantised_values_are_within_half_a_step(self, random):
        rows = random(50, 128) * 10 ** random(50, 1)
        values, scale = fp8.quantize(rows)
        assert values.dtype == torch.float8_e4m3fn
        # 3 mantissa bits; below 2**-6 the step is that of the subnormals.
        step = (rows.abs() * 2**-4).clamp_min(scale * 2**-10)
        assert ((values.float() * scale - rows).abs() <= step).all()

    def test_representable_keys_come_back_exactly(self):
        keys = torch.tensor([[1.0, -1.75, 0.0, 448.0], [2.0**-20, -1.125 * 2**-19, 0, 2**-21]])
        cache = torch.zeros(6, 8, dtype=torch.uint8)
        store_index_keys(cache, slots(5, 2), keys)
        values, scales = load(cache, slots(2, 5))
        assert (values * scales.unsqueeze(1)).tolist() == keys.flip(0).tolist()
        assert scales.tolist() == [2.0**-27, 1.0]
        assert [part.shape[0] for part in load(cache, slots())] == [0, 0]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_is_stored_is_what_quantize_gives(self, random, dtype):
        keys = random(7, 128).to(dtype)
        cache = torch.full((20, 132), 0xAB, dtype=torch.uint8)
        where = slots(3, 19, 0, 8, 11, 4, 7)
        store_index_keys(cache, where, keys)
        values, scale = fp8.quantize(keys)
        loaded, scales = load(cache, where)
        assert torch.equal(loaded, values.float())
        assert torch.equal(scales, scale.squeeze(1))

    @pytest.mark.parametrize("where", [[-1, 1, -1], [-1, -1, -1], []])
    def test_skipped_slots_write_nothing_not_even_the_last_row(self, random, where):
        cache = torch.full((4, 132), 0xAB, dtype=torch.uint8)
        store_index_keys(cache, slots(*where), random(len(where), 128))
        untouched = [row for row in range(4) if row not in where]
        assert (cache[untouched] == 0xAB).all()
        assert not (cache[[row for row in where if row >= 0]] == 0xAB).all(1).any()


class TestIndexScores:
    table = torch.tensor([[2, 0, 9], [1, 3, 9]], dtype=torch.int32)
    cache_slots: ClassVar = [[8, 9, 10, 11, 0, 1, 2], [4, 5, 6]]  # blocks of 4

    def test_against_einsum_in_float64_for_requests_of_their_own_lengths(self, random):
        cache = torch.full((16, 20), 0x7F, dtype=torch.uint8)  # NaN
        for request in self.cache_slots:
            store_index_keys(cache, slots(*request), random(len(request), 16))
        queries, weights = fp8.quantize(random(6, 3, 16))[0], random(6, 3)
        requests, positions = slots(0, 0, 0, 1, -1, -1), slots(0, 5, 6, 2, 5, -1)
        scores = index_scores(queries, weights, cache, self.table, requests, positions, 4, 9)
        assert scores.shape == (6, 9)
        for token, position in enumerate(positions.tolist()):
            may_read = position + 1 if requests[token] >= 0 else 0
            keys, scales = load(cache, slots(*self.cache_slots[requests[token]][:may_read]))
            dots = torch.einsum("hd,sd->hs", queries[token].double(), keys.double()).relu()
            expected = weights[token].double() @ dots * scales.double()
            torch.testing.assert_close(
                scores[token, :may_read].double(), expected, rtol=1e-5, atol=1e-3
            )
            assert (scores[token, may_read:] == -torch.inf).all()

    def test_negative_dot_products_do_not_count(self):
        queries = torch.tensor([[[1.0], [-1.0]]]).to(torch.float8_e4m3fn)
        cache = torch.zeros(2, 5, dtype=torch.uint8)
        store_index_keys(cache, slots(0, 1), torch.tensor([[2.0], [-3.0]]))
        weights, table = torch.tensor([[1.0, 10.0]]), torch.zeros(1, 1, dtype=torch.int32)
        scores = index_scores(queries, weights, cache, table, slots(0), slots(1), 2, 2)
        assert scores.tolist() == [[2.0, 30.0]]

    def test_a_request_has_the_same_bits_in_every_batch(self, random):
        """However long the others are, and wherever in the batch its tokens stand."""
        tokens, length, heads = 5, 137, 32  # one row in 16 is aligned
        cache = torch.zeros(40 * 16, 132, dtype=torch.uint8)
        store_index_keys(cache, torch.arange(len(cache)), random(len(cache), 128))
        queries, weights = fp8.quantize(random(20, heads, 128))[0], random(20, heads)
        table = torch.randperm(40, generator=torch.Generator().manual_seed(0)).int().view(2, 20)
        last = torch.arange(length - tokens, length)

        def scores(before, width):
            """Behind `before` tokens of another request."""
            requests = slots(*[1] * before, *[0] * tokens)
            positions = torch.cat((torch.arange(300 - before, 300), last))
            first = 15 - before
            part = slice(first, first + before + tokens)
            arguments = (cache, table, requests, positions, 16, width)
            found = index_scores(queries[part], weights[part], *arguments)
            return found[before:, :length]

        alone = scores(0, length)
        for before in (1, 2, 3, 15):
            assert torch.equal(scores(before, 300), alone)

    def test_no_tokens(self):
        none = torch.empty(0, 2, 16, dtype=torch.float8_e4m3fn)
        cache = torch.empty(0, 20, dtype=torch.uint8)
        scores = index_scores(none, torch.empty(0, 2), cache, self.table, slots(), slots(), 4, 7)
        assert scores.shape == (0, 7)


class TestTopk:
    @staticmethod
    def brute_force(scores, position, k):
        readable = [p for p, score in enumerate(scores[: position + 1]) if score > -math.inf]
        best = sorted(sorted(readable, key=lambda p: (-scores[p], p))[:k])
        return best + [-1] * (k - len(best))

    @pytest.mark.parametrize("k", [1, 2, 5, 8])
    @pytest.mark.parametrize("width", [0, 1, 5, 8, 13, 40])
    @pytest.mark.parametrize("levels", [2, 5, 1000])
    @pytest.mark.parametrize("workspace", [4 << 20, 500])
    def test_against_brute_force_with_ties(self, k, width, levels, workspace, monkeypatch):
        monkeypatch.setattr("vllm_ula.kernels.reference.topk.WORKSPACE_BYTES", workspace)
        generator = torch.Generator().manual_seed(k * width + levels)
        scores = torch.randint(0, levels, (30, width), generator=generator).float()
        kind = torch.rand(scores.shape, generator=generator)
        scores[kind < 0.3], scores[kind < 0.1] = -torch.inf, NAN
        positions = torch.randint(-1, max(width, 1), (30,), generator=generator)
        selection = topk(scores, positions, k)
        assert selection.dtype == torch.int32
        rows = zip(scores.tolist(), positions.tolist(), strict=True)
        assert selection.tolist() == [self.brute_force(*row, k) for row in rows]


class TestSparseMla:
    def test_against_softmax_in_float64(self, random):
        queries, device, host = random(6, 3, 12), random(9, 12), random(7, 12)
        generator = torch.Generator().manual_seed(1)
        homes = torch.randint(-8, 16, (6, 7), generator=generator).clamp_min(-1)
        homes[2], homes[3] = torch.arange(5, 12), -1
        homes[3, 4] = 11
        out, lse = sparse_mla(queries, device, host, homes, 0.3, 8)
        for token in range(6):
            kept = torch.cat((device, host))[homes[token][homes[token] >= 0]].double()
            logits = queries[token].double() @ kept.T * 0.3
            expected = logits.softmax(-1) @ kept[:, :8]
            torch.testing.assert_close(out[token].double(), expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                lse[token].double(), logits.logsumexp(-1), rtol=1e-6, atol=1e-6
            )

    def test_an_empty_selection_gives_zero_and_minus_infinity(self, random):
        device, homes = random(5, 12), torch.full((2, 5), -1)
        homes[1, 3] = 4
        out, lse = sparse_mla(random(2, 3, 12), device, device[:0], homes, 1.0, 8)
        assert (out[0] == 0).all()
        assert (lse[0] == -torch.inf).all()
        torch.testing.assert_close(out[1], device[4, :8].expand(3, 8))
        assert lse[1].isfinite().all()

    def test_rows_not_selected_do_not_count(self, random):
        queries, device, host = random(2, 3, 12), random(5, 12), random(4, 12)
        homes = torch.tensor([[0, -1, 3, 8, -1], [3, 7, -1, -1, 0]])
        out, lse = sparse_mla(queries, device, host, homes, 1.0, 8)
        device[[1, 2, 4]], host[[0, 1]] = NAN, NAN
        again, lse_again = sparse_mla(queries, device, host, homes, 1.0, 8)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)

    @pytest.mark.parametrize("kind", ["fp8", "bf16", "fp16", "fp32"])
    def test_rows_count_as_what_they_stand_for(self, random, kind):
        """In float32, however they are kept; and queries of another type as theirs."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
        queries, rows = random(3, 2, 576).to(dtype), random(9, 576)
        kept = fp8_rows.pack(rows) if kind == "fp8" else rows.to(dtype)
        floats = fp8_rows.unpack(kept) if kind == "fp8" else kept.float()
        homes = torch.randint(-1, 9, (3, 6), generator=torch.Generator().manual_seed(2))
        expected = sparse_mla(queries.float(), floats[:4], floats[4:], homes, 0.05, 512)
        found = sparse_mla(queries, kept[:4], kept[4:], homes, 0.05, 512)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    @pytest.mark.parametrize(
        ("tokens", "heads", "width", "latent", "num_rows"),
        [
            (2, 4, 576, 512, 128),
            (7, 4, 576, 512, 128),
            (9, 3, 576, 512, 101),
            (17, 1, 576, 512, 64),
            (61, 4, 576, 512, 128),  # two chunks
        ],
    )
    def test_a_token_gives_the_same_bits_at_every_position_of_a_batch(
        self, random, tokens, heads, width, latent, num_rows
    ):
        queries, device = random(tokens, heads, width), random(tokens * num_rows // 2, width)
        host = random(tokens * num_rows - len(device), width)
        homes = torch.randperm(len(device) + len(host)).view(tokens, num_rows)
        out, lse = sparse_mla(queries, device, host, homes, width**-0.5, latent)
        for shift in range(1, tokens, max(tokens // 16, 1)):
            at = torch.arange(tokens).roll(shift)
            moved, moved_lse = sparse_mla(queries[at], device, host, homes[at], width**-0.5, latent)
            assert torch.equal(moved, out[at])
            assert torch.equal(moved_lse, lse[at])
        alone, alone_lse = sparse_mla(queries[:1], device, host, homes[:1], width**-0.5, latent)
        assert torch.equal(alone, out[:1])
        assert torch.equal(alone_lse, lse[:1])


class TestGatherAndScatter:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_rows_come_from_both_tiers_and_stale_bytes_from_none(self, dtype):
        device = torch.tensor([[NAN, NAN], [1, 2], [3, 4]], dtype=dtype)
        host = torch.tensor([[5, 6], [NAN, NAN]], dtype=dtype)
        read = gather(device, host, torch.tensor([[2, -1, 3], [-1, 1, 2]]))
        assert read.dtype == dtype
        assert read.tolist() == [[[3, 4], [0, 0], [5, 6]], [[0, 0], [1, 2], [3, 4]]]

    def test_rows_of_one_tier_only(self):
        device, host = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
        assert gather(device, host, slots(1, 0)).tolist() == [[2], [1]]
        assert gather(device, host, slots(3, 2, 3)).tolist() == [[4], [3], [4]]
        assert gather(device, host[:0], slots(0, -1)).tolist() == [[1], [0]]
        assert gather(device, host, torch.empty(0, 5, dtype=torch.int64)).shape == (0, 5, 1)

    @pytest.mark.parametrize("homes", [[1, 4, 0, 3], [1, 0], [3, 4], [-1, 4, -1, 0], [2, -1], []])
    def test_only_the_rows_written_change(self, homes):
        device, host = torch.full((3, 2), NAN), torch.full((2, 2), NAN)
        rows = torch.arange(2.0 * len(homes)).view(-1, 2)
        scatter(device, host, slots(*homes), rows)
        both, kept = torch.cat((device, host)), slots(*homes) >= 0
        assert torch.equal(both[slots(*homes)[kept]], rows[kept])
        assert both.isnan().all(1).tolist() == [home not in homes for home in range(5)]

    def test_without_host_rows(self):
        device = torch.full((3, 1), NAN)
        scatter(device, torch.empty(0, 1), slots(2), torch.ones(1, 1))
        assert device[2].item() == 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_rows_of_another_type_are_converted(self, random, dtype):
        device, rows = torch.full((3, 8), NAN, dtype=dtype), random(2, 8)
        scatter(device, device[:0], slots(2, 0), rows)
        assert torch.equal(device[[2, 0]], rows.to(dtype))

    def test_fp8_rows_are_packed_on_the_way_in_and_unpacked_on_the_way_out(self, random):
        device, host = (torch.full((n, 656), 255, dtype=torch.uint8) for n in (3, 2))
        rows, homes = random(4, 576).bfloat16(), slots(4, 0, -1, 2)
        scatter(device, host, homes, rows)
        expected = fp8_rows.unpack(fp8_rows.pack(rows))
        expected[2] = 0
        found = gather(device, host, homes)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.float(), expected)
        assert (device[1] == 255).all()
        assert (host[0] == 255).all()

    def test_what_is_scattered_is_what_is_gathered(self, random):
        homes = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:25]
        device, host, rows = torch.full((16, 9), NAN), torch.full((24, 9), NAN), random(25, 9)
        scatter(device, host, homes, rows)
        assert torch.equal(gather(device, host, homes), rows)


class TestExchange:
    @staticmethod
    def exchanged(fetch, write_back, num=None, layers=1):
        """What device row d = d and host row h = 10 + h hold afterwards, in each layer."""
        rows = [
            LayerRows(f"{i}", torch.arange(4.0).view(4, 1), 10 + torch.arange(5.0).view(5, 1))
            for i in range(layers)
        ]
        fetch, write_back = torch.tensor(fetch).bool(), torch.tensor(write_back).bool()
        count = None if num is None else torch.tensor([num], dtype=torch.int32)
        exchange(slots(2, 1, 0), slots(0, 3, 1), fetch, write_back, count, rows)
        return [(x.device.flatten().tolist(), x.host.flatten().tolist()) for x in rows]

    def test_every_row_is_read_before_any_is_written(self):
        expected = [11, 13, 10, 3], [2, 0, 12, 1, 14]
        assert self.exchanged([1, 1, 1], [1, 1, 1], layers=2) == [expected, expected]

    def test_fetched_and_written_back_are_chosen_row_by_row(self):
        assert self.exchanged([1, 0, 0], [0, 1, 0]) == [([0, 1, 10, 3], [10, 11, 12, 1, 14])]
        assert self.exchanged([0, 0, 0], [0, 0, 0]) == [([0, 1, 2, 3], [10, 11, 12, 13, 14])]

    @pytest.mark.parametrize(
        ("num", "expected"),
        [
            (0, ([0, 1, 2, 3], [10, 11, 12, 13, 14])),
            (1, ([0, 1, 10, 3], [2, 11, 12, 13, 14])),
            (2, ([0, 13, 10, 3], [2, 11, 12, 1, 14])),
        ],
    )
    def test_entries_beyond_the_count_stay(self, num, expected):
        assert self.exchanged([1, 1, 1], [1, 1, 1], num) == [expected]


class TestFp8Rows:
    def test_layout(self):
        """656 bytes: fp8 latent, four float32 scales, bf16 rope."""
        row = torch.zeros(1, 576)
        row[0, 0], row[0, 511], row[0, 512], row[0, 575] = 448.0, -2 * 448.0, 1.5, -3.0
        packed = fp8_rows.pack(row)
        assert (packed.dtype, tuple(packed.shape)) == (torch.uint8, (1, 656))
        assert packed[0, :512].view(torch.float8_e4m3fn)[[0, 511]].tolist() == [448.0, -448.0]
        smallest = 2.0**-13  # of a tile of zeros: 1e-4, rounded up to a power of two
        scales = packed[0, 512:528].view(torch.float32)
        assert scales.tolist() == [1.0, smallest, smallest, 2.0]
        assert packed[0, 528:].view(torch.bfloat16)[[0, 63]].tolist() == [1.5, -3.0]
        assert torch.equal(fp8_rows.unpack(packed), row)

    def test_error_is_that_of_the_format(self, random):
        """Three bits of mantissa: 1/16 of a value, or half a step of the smallest values."""
        rows = random(50, 576) * torch.logspace(-3, 3, 50).unsqueeze(1)
        unpacked = fp8_rows.unpack(fp8_rows.pack(rows))
        scales = fp8.power_of_two_scale(rows[:, :512].view(50, 4, 128), 448e-4)
        step = (scales * 2.0**-9).expand(50, 4, 128).reshape(50, 512)
        error = (unpacked - rows).abs()
        assert (error[:, :512] <= (rows[:, :512].abs() / 16).maximum(step / 2)).all()
        assert (error[:, 512:] <= rows[:, 512:].abs() / 256).all()

    def test_packing_again_changes_nothing(self, random):
        kept = fp8_rows.unpack(fp8_rows.pack(random(20, 576)))
        assert torch.equal(fp8_rows.unpack(fp8_rows.pack(kept)), kept)

    def test_no_rows(self):
        assert fp8_rows.pack(torch.zeros(0, 576)).shape == (0, 656)
        assert fp8_rows.unpack(torch.zeros(3, 0, 656, dtype=torch.uint8)).shape == (3, 0, 576)

    def test_every_value_under_every_scale_is_exact_in_bf16(self):
        values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        # From the smallest scale to the largest under which 448 is a float32.
        products = values * 2.0 ** torch.arange(-14, 119).unsqueeze(1)
        assert products.isfinite().all()
        assert torch.equal(products.bfloat16().float(), products)

    def test_attention_is_within_the_bound_of_the_format(self, random):
        """Against bf16 rows; and a control with two rows swapped is not.

        Logits move by at most d = scale * |q| . |error|, so weights by a factor of e^2d, and the
        output by (e^2d - 1) max|v| + max|error|, to which each format adds its own error.
        """
        tokens, heads, k, scale = 4, 3, 64, 576**-0.5
        rows, queries = random(tokens * k, 576), random(tokens, heads, 576)
        homes = torch.arange(tokens * k).view(tokens, k)
        packed, bf16 = fp8_rows.pack(rows), rows.bfloat16()
        expected, _ = sparse_mla(queries, bf16, bf16[:0], homes, scale, 512)
        found, _ = sparse_mla(queries, packed, packed[:0], homes, scale, 512)

        error = (rows.abs() / 16 + rows.abs() / 256).view(tokens, k, 576)
        moved = scale * torch.einsum("thw,tkw->thk", queries.abs(), error).amax(2)
        bound = moved.mul(2).expm1() * rows.abs().amax() + error.amax()
        assert ((found - expected).abs().amax(2) <= bound).all()
        assert (found - expected).abs().amax() < 0.1 * expected.abs().amax()

        wrong = packed.view(tokens, k, 656).clone()
        wrong[0, 0], wrong[1] = packed[k], packed[:k]
        wrong = wrong.view(-1, 656)
        other, _ = sparse_mla(queries, wrong, wrong[:0], homes, scale, 512)
        assert (other - expected).abs().amax() > 0.1 * expected.abs().amax()
