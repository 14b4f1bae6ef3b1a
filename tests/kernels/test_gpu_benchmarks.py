"""The script for a GPU runs to its end without one, and says nothing it has not measured."""

import csv
from itertools import product

import pytest
import torch

from benchmarks.gpu import (
    attention_cases,
    cases,
    decode_step,
    exchange_cases,
    index_cases,
    map_cases,
    row_cases,
    selection_cases,
)
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.bench import DRY, REAL, Bench
from benchmarks.gpu.case import Case, Figure, Mismatch, expect_close, expect_equal
from benchmarks.gpu.history import NUM_CALLS, history
from benchmarks.gpu.rows import LARGEST
from benchmarks.gpu.timing import Timer
from vllm_ula.kernels import dispatch
from vllm_ula.kernels.reference import fp8_rows


@pytest.fixture
def dry(tmp_path, capsys):
    def run(*arguments):
        path = tmp_path / "gpu.csv"
        code = main(["--dry", "--csv", str(path), *arguments])
        rows = list(csv.DictReader(path.open())) if path.exists() else []
        return code, capsys.readouterr().out, rows

    return run


def test_a_dry_run_checks_and_measures_nothing(dry):
    code, text, rows = dry()
    assert code == 0, text
    for case in cases.CASES:
        assert f"right     {case.name}\n" in text
        assert f"measured  {case.name}\n" in text
    assert {row["case"] for row in rows} == {case.name for case in cases.CASES}
    for row in rows:
        assert {row["ours us"], row["baseline us"], row["ratio"], row["of limit"]} <= {"dry", ""}
        assert row["met"] == ""


def test_only_the_named_cases_run(dry):
    _, _, rows = dry("translate")
    assert {row["case"] for row in rows} == {"translate"}
    with pytest.raises(SystemExit):
        main(["--dry", "unknown"])


def test_without_a_gpu_only_a_dry_run_is_possible(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "no GPU here; --dry runs on a CPU" in capsys.readouterr().err


class TestCases:
    @pytest.fixture
    def only(self, monkeypatch):
        def run(check, measure=lambda bench: []):
            monkeypatch.setattr(cases, "CASES", (Case("own", check, measure),))

        return run

    def test_control_what_is_wrong_is_not_measured(self, dry, only):
        def check(bench):
            expect_equal("sums", torch.tensor([1, 2]), torch.tensor([1, 3]))

        only(check, lambda bench: [Figure("own", "1", 1.0)])
        code, text, rows = dry()
        assert code == 1
        differ = "1 of 2 values differ, first at (1,): 2, its reference says 3"
        assert f"FAILED    own: Mismatch: sums: {differ}\n" in text
        assert rows == []

    def test_control_a_case_that_breaks_does_not_end_the_others(self, dry, only, monkeypatch):
        def broken(bench):
            raise RuntimeError("out of memory")

        only(lambda bench: None, broken)
        good = Case("good", lambda bench: None, lambda bench: [Figure("good", "1", 2.0)])
        monkeypatch.setattr(cases, "CASES", (*cases.CASES, good))
        code, text, rows = dry()
        assert code == 1
        assert "FAILED    own: RuntimeError: out of memory\n" in text
        assert [row["case"] for row in rows] == ["good"]

    def test_nothing_starts_when_time_is_up(self, dry, only):
        only(lambda bench: None)
        code, text, _ = dry("--seconds", "0")
        assert code == 1
        assert "FAILED    own: TimeoutError: not started within 0 s\n" in text

    def test_figures_and_goals_are_printed(self, dry, only):
        figures = [
            Figure("own", "1", 12.0, "torch", 30.0, 0.5, "<= 20 us", True),
            Figure("own", "2", 12.0, "torch", 24.0, None, "<= 10 us", False),
        ]
        only(lambda bench: None, lambda bench: figures)
        _, text, rows = dry()
        assert [row["ratio"] for row in rows] == ["0.40", "0.50"]
        assert [row["of limit"] for row in rows] == ["50%", ""]
        assert [row["met"] for row in rows] == ["met", "MISSED"]
        assert "12.0     torch     30.0         0.40   50%       <= 20 us  met\n" in text


@pytest.mark.parametrize("ours", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)])
def test_control_another_shape_or_type_is_a_mismatch(ours):
    with pytest.raises(Mismatch):
        expect_equal("sums", ours, torch.zeros(2))


def test_close_is_what_differs_by_no_more_than_the_bound():
    reference = torch.tensor([1.0, -torch.inf, torch.inf])
    expect_close("sums", reference + 0.25, reference, 0.25)
    for i, value in enumerate((1.26, torch.inf, torch.nan)):
        ours = reference.clone()
        ours[i] = value
        with pytest.raises(
            Mismatch, match=rf"1 of 3 values differ by more than 0.25, first at \({i},"
        ):
            expect_close("sums", ours, reference, 0.25)


def test_every_operation_has_a_case():
    named = {case.name.partition(" ")[0] for case in cases.CASES}
    map_work = {"seat", "claim", "touch", "victims", "remap", "bury"}
    assert set(dispatch.references) - map_work <= named


@pytest.fixture
def bench():
    bench = Bench(torch.device("cpu"), DRY, Timer(dry=True))
    yield bench
    bench.close()


def another_row(original):
    """Attention with one wrong row of one token."""

    def run(queries, device, host, homes, *rest, **staged):
        homes = homes.clone()
        homes[-1, -2] = (homes[-1, -2] + 1) % len(device)
        return original(queries, device, host, homes, *rest, **staged)

    return run


def one_entry_less(original):
    """An exchange that forgets its last entry."""
    return lambda *lists: original(*lists[:4], lists[4] - 1, lists[5])


def nothing_written(original):
    return lambda *arguments: None


def one_home_twice(original):
    """A remap after which a token selects one row twice and another not at all."""

    def run(tables, call):
        original(tables, call)
        call.selected_homes[-1, 0] = call.selected_homes[-1, 1]

    return run


def last_differs(original):
    """The last value of the result is another one."""

    def run(*arguments):
        found = original(*arguments)
        flat = found.view(-1)
        flat[-1] = torch.where(flat[-1] == 1, 2, 1)
        return found

    return run


@pytest.mark.parametrize(
    ("name", "module", "operation", "spoil"),
    [
        ("store_index_keys", index_cases, "store_index_keys", nothing_written),
        ("index_scores", index_cases, "index_scores", last_differs),
        ("topk", selection_cases, "topk", last_differs),
        ("logical_slots", selection_cases, "logical_slots", last_differs),
        ("gather", row_cases, "gather", last_differs),
        ("gather from host", row_cases, "gather", last_differs),
        ("scatter", row_cases, "scatter", nothing_written),
        ("sparse_mla decode", attention_cases, "sparse_mla", another_row),
        ("sparse_mla prefill", attention_cases, "sparse_mla", another_row),
        ("exchange", exchange_cases, "exchange", one_entry_less),
        ("decode step", decode_step, "exchange", one_entry_less),
        ("decode step", decode_step, "scatter", nothing_written),
        ("decode step", decode_step, "remap", one_home_twice),
    ],
)
def test_control_an_operation_that_errs_is_found(
    bench, monkeypatch, name, module, operation, spoil
):
    monkeypatch.setattr(module, operation, spoil(getattr(module, operation)))
    (case,) = (case for case in cases.CASES if case.name == name)
    with pytest.raises(Mismatch):
        case.check(bench)


def test_rows_hold_what_attention_takes_for_granted(bench):
    """No value is larger than the bound of its rounding assumes; rows differ from each other."""
    for layer in bench.layers:
        for tier in (layer.device, layer.host):
            rows = fp8_rows.unpack(tier)
            assert 0.99 * LARGEST < rows.abs().max() <= LARGEST
            assert len(tier.unique(dim=0)) > 0.2 * DRY.rows
    assert not torch.equal(bench.layers[0].device, bench.layers[1].device)


@pytest.mark.parametrize("requests", DRY.requests)
class TestHistory:
    @pytest.fixture
    def past(self, bench, requests):
        return history(bench, requests)

    def test_both_views_hold_the_same_rows(self, past, requests):
        assert past.home.sort().values.tolist() == list(range(DRY.slots))
        first = torch.arange(requests)[:, None] * past.positions
        held = (past.held + first).flatten().sort().values
        assert held.tolist() == (past.home < DRY.rows).nonzero().flatten().tolist()
        stamps = past.stamp[past.home[past.held + first].long()].gather(1, past.order.long())
        assert (stamps.diff() >= 0).all()

    def test_every_call_misses_what_is_asked_and_hits_no_old_row(self, past, requests):
        seen = []
        for slots in past.slots:
            assert all(len(set(row)) == DRY.topk for row in slots.tolist())
            homes = past.home[slots]
            assert ((homes >= DRY.rows).sum(1) == DRY.missing).all()
            assert past.stamp[homes[homes < DRY.rows].long()].min() > 50
            seen += slots[homes >= DRY.rows].tolist()
        assert len(set(seen)) == len(seen) == NUM_CALLS * past.missing

    def test_what_a_call_writes_is_on_the_host_and_selected_by_none(self, past, requests):
        written = torch.cat(past.written)
        assert len(written) == len(written.unique()) == NUM_CALLS * requests
        assert (past.home[written] >= DRY.rows).all()
        assert not torch.isin(written, torch.cat(past.slots)).any()


@pytest.mark.parametrize("sizes", [REAL, DRY])
def test_old_rows_suffice_for_all_calls(sizes):
    for requests, device_rows in product(sizes.requests, (sizes.rows, None)):
        rows = device_rows // requests if device_rows else map_cases.HOT_ROWS * sizes.topk
        assert sizes.rows % requests == sizes.slots % requests == 0
        assert NUM_CALLS * sizes.missing <= rows // 4
        assert sizes.topk - sizes.missing <= rows - rows // 4
        assert rows + NUM_CALLS * (sizes.missing + 1) <= sizes.slots // requests
