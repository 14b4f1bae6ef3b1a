"""Calls on four device rows, with what must come of them written out.

Logical slots 0 to 3 start in device rows 0 to 3, the others on the host in order. `full` rigs have
written all of them, so that device row 0 is the coldest and row 3 the warmest.
"""

import pytest

from tests.core.rig import ROW_BYTES, Rig
from vllm_ula.records import Counts


def full(recency, num_host=4):
    rig = Rig(recency, 4, num_host)
    rig.fill(range(4 + num_host))
    return rig


def moved(fetched=0, written_back=0, **counts):
    """Counts of a call that moved bytes of one layer."""
    return Counts(
        fetched=fetched,
        written_back=written_back,
        fetched_bytes=fetched * ROW_BYTES,
        written_back_bytes=written_back * ROW_BYTES,
        exchanges=1,
        **counts,
    )


class TestPromotion:
    def test_a_selected_host_row_swaps_places_with_the_coldest(self, recency):
        rig = full(recency)
        called = rig.step(select=[[5]])
        assert (called.incoming, called.victims) == ([5], [0])
        assert rig.homes == [5, 1, 2, 3, 4, 0, 6, 7]
        assert called.counts == moved(selected=1, fetched=1, written_back=1)

    def test_a_row_on_the_device_is_a_hit_and_becomes_the_warmest(self, recency):
        rig = full(recency)
        called = rig.step(select=[[0]])
        assert called.counts == Counts(selected=1, hits=1)
        assert rig.step(select=[[5]]).victims == [1]

    def test_a_dead_victim_is_overwritten_not_copied_out(self, recency):
        rig = full(recency)
        rig.die([2])
        called = rig.step(select=[[5]])
        assert (called.victims, called.written_back) == ([2], [])
        assert rig.homes == [0, 1, 5, 3, 4, 2, 6, 7]
        assert called.counts == moved(selected=1, fetched=1)

    def test_rows_the_call_uses_are_no_victims(self, recency):
        rig = full(recency)
        called = rig.step(select=[[0, 1, 5]])
        assert called.victims == [2]
        assert called.counts == moved(selected=3, hits=2, fetched=1, written_back=1)

    def test_a_row_is_counted_once_however_often_it_is_selected(self, recency):
        rig = full(recency)
        called = rig.step(select=[[1, 1, 4, 4], [4, 1, 4, 1]])
        assert called.counts == moved(selected=2, hits=1, fetched=1, written_back=1)

    def test_padding_selects_nothing(self, recency):
        rig = full(recency)
        called = rig.step(select=[[-1, 5, -1], [-1, -1, -1]])
        assert called.incoming == [5]
        assert rig.homes[7] == 7
        assert called.counts == moved(selected=1, fetched=1, written_back=1)

    def test_the_whole_device_pool_can_change_hands(self, recency):
        rig = full(recency)
        called = rig.step(select=[[4, 5], [6, 7]])
        assert called.victims == [0, 1, 2, 3]
        assert rig.homes == [4, 5, 6, 7, 0, 1, 2, 3]
        assert called.counts == moved(selected=4, fetched=4, written_back=4)

    def test_every_layer_of_the_domain_moves_in_the_one_exchange(self, recency):
        rig = Rig(recency, 4, 4, num_layers=3)
        rig.fill(range(8))
        called = rig.step(select=[[5]])
        assert called.counts == Counts(
            selected=1,
            fetched=1,
            written_back=1,
            fetched_bytes=3 * ROW_BYTES,
            written_back_bytes=3 * ROW_BYTES,
            exchanges=1,
        )


class TestWrites:
    def test_a_row_written_for_the_first_time_is_not_fetched(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(7))
        called = rig.step(write=[7], select=[[7, 1]])
        assert called.homes == [0]
        assert (called.fetched, called.written_back) == ([], [0])
        assert called.counts == moved(selected=2, hits=2, written_back=1)

    def test_a_decode_write_takes_a_victim(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(7))
        called = rig.step(write=[7])
        assert (called.homes, called.victims) == ([0], [0])
        assert rig.homes == [7, 1, 2, 3, 4, 5, 6, 0]
        assert called.counts == moved(written_back=1)

    def test_a_decode_write_prefers_a_dead_row(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(7))
        rig.die([3])
        called = rig.step(write=[7])
        assert called.homes == [3]
        assert called.counts == Counts()

    def test_a_prefill_write_takes_a_dead_row_without_moving_a_byte(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(7))
        rig.die([2])
        called = rig.step(write=[7], decode=False)
        assert called.homes == [2]
        assert rig.homes == [0, 1, 7, 3, 4, 5, 6, 2]
        assert called.counts == Counts()

    def test_a_prefill_write_without_a_dead_row_goes_to_the_host(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(7))
        called = rig.step(write=[7], decode=False)
        assert (called.homes, called.incoming) == ([7], [])
        assert called.counts == Counts()

    def test_a_rejected_draft_is_rewritten_where_it_lies(self, recency):
        rig = full(recency)
        first, second = rig.step(write=[7]), rig.step(write=[7])
        assert first.homes == second.homes == [0]
        assert second.counts == Counts()

    @pytest.mark.parametrize(("decode", "homes"), [(True, [0, 1]), (False, [0, 5])])
    def test_no_row_takes_the_still_dead_home_of_another_being_written(
        self, recency, decode, homes
    ):
        rig = Rig(recency, 4, 4)
        rig.fill(range(5))
        rig.die([0])
        assert rig.step(write=[0, 5], decode=decode).homes == homes

    def test_dead_rows_go_to_what_decode_reads_before_what_prefill_writes(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(6))
        rig.die([2])
        called = rig.step(write=[6], select=[[4]], write_by_decode=False)
        assert (called.incoming, called.victims, called.homes) == ([4], [2], [6])
        rig.die([1, 3])
        called = rig.step(write=[7], select=[[5]], write_by_decode=False)
        assert (called.incoming, called.victims) == ([5, 7], [1, 3])
        assert called.homes[0] in (1, 3)
        assert called.counts == moved(selected=1, fetched=1)

    def test_more_rows_than_the_pool_holds_are_written_all_the_same(self, recency):
        """K06: what the device has no room for must not disturb the rest of the batch."""
        rig = Rig(recency, 4, 8)
        rig.fill(range(4))
        called = rig.step(write=[4, 5, 6, 7, 8, 9], select=[[4, 9], [8, 0]])
        assert called.homes == [0, 1, 2, 3, 8, 9]
        # Token 1 needs row 9, for which no room is left, so both tokens are read in place.
        assert called.counts == moved(
            selected=4, written_back=4, in_place_device=1, in_place_host=3
        )


class TestReadingInPlace:
    def test_prefill_reads_where_rows_live_and_evicts_nobody(self, recency):
        rig = full(recency)
        called = rig.step(select=[[1, 5], [6]], decode=False)
        assert called.incoming == []
        assert rig.homes == list(range(8))
        assert called.counts == Counts(selected=3, in_place_device=1, in_place_host=2)

    def test_prefill_reads_keep_no_row_warm(self, recency):
        rig = full(recency)
        rig.step(select=[[0]], decode=False)
        assert rig.step(select=[[5]]).victims == [0]

    def test_a_row_prefill_reads_can_be_evicted_by_the_same_call(self, recency):
        rig = full(recency)
        called = rig.step(select=[[0, 6], [5]], decode=[False, True], write_by_decode=False)
        assert called.victims == [0]
        assert called.counts == moved(selected=3, fetched=1, written_back=1, in_place_host=2)

    def test_a_row_decode_and_prefill_both_read_is_promoted(self, recency):
        rig = full(recency)
        called = rig.step(select=[[5], [5]], decode=[False, True], write_by_decode=False)
        assert called.counts == moved(selected=1, fetched=1, written_back=1)

    def test_decode_tokens_that_do_not_fit_are_read_in_place(self, recency):
        rig = full(recency)
        called = rig.step(select=[[0, 4], [4, 5], [6, 7], [0]])
        assert (called.incoming, called.victims) == ([4, 5], [1, 2])
        assert rig.homes == [0, 4, 5, 3, 1, 2, 6, 7]
        assert called.counts == moved(
            selected=5, hits=1, fetched=2, written_back=2, in_place_host=2
        )

    def test_no_token_overtakes_one_that_did_not_fit(self, recency):
        rig = full(recency)
        called = rig.step(select=[[0, 1, 2], [4, 5], [6]])
        assert called.counts == Counts(selected=6, hits=3, in_place_host=3)

    def test_rows_being_written_take_their_room_first(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(7))
        called = rig.step(write=[7], select=[[4, 5], [6, 0]])
        assert (called.incoming, called.victims, called.homes) == ([4, 5, 7], [0, 1, 2], [2])
        # Row 0 of the token read in place has just been evicted: it is read from its new home.
        assert rig.homes == [4, 5, 7, 3, 0, 1, 6, 2]
        assert called.counts == moved(selected=4, fetched=2, written_back=3, in_place_host=2)

    def test_one_token_always_fits_beside_the_row_it_writes(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(7))
        called = rig.step(write=[7], select=[[4, 5, 6]])
        assert sorted(rig.homes[slot] for slot in [4, 5, 6, 7]) == [0, 1, 2, 3]
        assert called.counts == moved(selected=3, fetched=3, written_back=4)

    def test_a_prefix_hit_reads_rows_another_request_writes_in_the_same_call(self, recency):
        rig = Rig(recency, 4, 4)
        rig.fill(range(6))
        called = rig.step(
            write=[6, 7],
            write_by_decode=False,
            select=[[6], [6, 7], [7, 5]],
            decode=[False, False, True],
        )
        assert (called.incoming, called.fetched) == ([5, 7], [5])
        assert called.victims == [0, 1]
        assert (called.homes[0], called.homes[1] in (0, 1)) == (6, True)
        assert called.counts == moved(
            selected=3, hits=1, fetched=1, written_back=2, in_place_host=1
        )


class TestEdges:
    def test_an_empty_call_does_nothing(self, recency):
        rig = full(recency)
        assert rig.step().counts == Counts()
        assert rig.step(select=[[], []]).counts == Counts()
        assert rig.homes == list(range(8))

    def test_without_host_rows_all_is_a_hit(self, recency):
        rig = full(recency, num_host=0)
        called = rig.step(write=[0], select=[[0, 1], [2, 3]])
        assert called.homes == [0]
        assert called.counts == Counts(selected=4, hits=4)

    def test_a_new_row_is_not_the_next_victim(self, recency):
        """F04, in its numbering: write 1, 2, 3, 4; read 1, 2, 3; write 5; write 6."""
        rig = Rig(recency, 4, 4)
        for row in (1, 2, 3, 4):
            rig.step(write=[row - 1])
        for row in (1, 2, 3):
            rig.step(select=[[row - 1]])
        victims = []
        for row in (5, 6):
            rig.residency.states()  # reading metrics is no use
            before = rig.residency.owner.tolist()
            (victim,) = rig.step(write=[row - 1]).victims
            victims.append(before[victim] + 1)
        assert victims == [4, 1]
