"""Every policy on one trace: the command, what it saves, and what it refuses."""

import csv

import numpy as np
import pytest
from replay.rig import BLOCK, LOGICAL, random_story
from replay.shared_lru import SharedLru
from traces.samples import HEADER, random_events

from vllm_ula.cli import main
from vllm_ula.planner.hash_lru import HashLru
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.timestamp_lru import TimestampLru
from vllm_ula.replay.command import COLUMNS
from vllm_ula.replay.compare import POLICIES, Source, compare
from vllm_ula.replay.policy import Served, feed
from vllm_ula.replay.serving import ServingPolicy
from vllm_ula.replay.synthetic import Statistics
from vllm_ula.replay.workload import Workload, generate, header
from vllm_ula.traces import Admission, End, TraceWriter, open_trace

PNG = b"\x89PNG"


@pytest.fixture
def trace(tmp_path):
    """A trace on disk with two domains."""
    with TraceWriter(tmp_path / "trace", HEADER, max_bytes=1 << 24) as writer:
        for event in random_events(3):
            writer.write(event)
    return tmp_path / "trace"


def replayed(out):
    with (out / "replay.csv").open() as file:
        columns, *rows = csv.reader(file)
    assert tuple(columns) == COLUMNS
    return rows


@pytest.mark.parametrize("planner", [PbLru, TimestampLru, HashLru])
@pytest.mark.parametrize("device", [16, 40, 120])
def test_what_serves_is_what_is_replayed(planner, device):
    """Against the independent shared LRU: the same rows selected, nearly as many of them hits."""
    ours = ServingPolicy(planner(device), LOGICAL, BLOCK)
    oracle = SharedLru(LOGICAL, device, BLOCK)
    total, expected = Served(), Served()
    for seed in range(4):
        for event in random_story(seed):
            found, known = feed([ours], event), feed([oracle], event)
            parts = found.hits + found.fetched + found.in_place_device + found.in_place_host
            assert found.selected == known.selected == parts
            total, expected = total + found, expected + known
    ours.planning.check_integrity()
    assert total.selected > 500
    # Only which of the rows used last in one call goes first may differ.
    assert abs(total.hit_rate - expected.hit_rate) < (0.03 if planner is HashLru else 0.02)
    assert len(ours.plan_seconds) == len(ours.references)


def test_the_command_replays_a_recorded_trace(trace, tmp_path, capsys):
    arguments = ["--device-slots", "64,512", "--device-gib", "0.01", "--host-gib", "0.02"]
    assert main(["replay", str(trace), *arguments]) == 0
    out = capsys.readouterr().out
    assert "4,096 logical slots, 2 domains, top-k 6" in out
    assert "ulacache" in out
    rows = replayed(tmp_path / "trace.replay")
    assert [row[0] for row in rows] == [p for p in POLICIES for _ in range(2)]
    timed = [row[-2] != "" for row in rows]
    assert timed == [row[0] in ("pb_lru", "timestamp_lru", "hash_lru") for row in rows]
    for picture in ("hit_rate.png", "plan_time.png"):
        assert (tmp_path / "trace.replay" / picture).read_bytes().startswith(PNG)


def test_the_command_replays_a_synthetic_trace(tmp_path, capsys):
    arguments = ["--requests", "2", "--outputs", "24", "--policy", "pb_lru,timestamp_lru"]
    assert main(["replay", "synthetic", *arguments, "--out", str(tmp_path / "out")]) == 0
    assert "at most 2 requests" in capsys.readouterr().out
    rows = replayed(tmp_path / "out")
    assert len(rows) == 6
    hits = [float(row[3]) for row in rows]
    assert hits[:3] == sorted(hits[:3])  # more rows, more hits
    assert all(abs(a - b) < 1 for a, b in zip(hits[:3], hits[3:], strict=True))


def test_the_optimum_is_above_every_other():
    workload = Workload(2, 2, min_prompt=2000, max_prompt=4000, outputs=64)
    statistics = Statistics(topk=64)
    top = header(workload, statistics, 512)
    source = Source(top, lambda: generate(workload, statistics), peak=2)
    results, longest = compare(source, POLICIES, (256, 512))
    assert 2000 < longest <= 4064
    best = {r.device_slots: r.total.hit_rate for r in results if r.policy == "belady"}
    assert len(results) == 2 * len(POLICIES)
    for result in results:
        assert result.total.hit_rate <= best[result.device_slots] + 1e-9
        assert result.total.selected > 0


def test_hisparse_needs_top_k_rows_for_each_request():
    workload = Workload(4, 4, min_prompt=500, max_prompt=600, outputs=4)
    statistics = Statistics(topk=64)
    source = Source(header(workload, statistics, 512), lambda: generate(workload, statistics), 4)
    results, _ = compare(source, ("pb_lru", "sglang_hisparse", "vllm_hisparse"), (128, 256))
    assert [(r.policy, r.device_slots) for r in results] == [
        ("pb_lru", 128),
        ("pb_lru", 256),
        ("sglang_hisparse", 256),
        ("vllm_hisparse", 256),
    ]


def test_peak_of_a_trace(trace):
    live = peak = 0
    found = open_trace(trace)
    for event in found.events():
        live += isinstance(event, Admission) - isinstance(event, End)
        peak = max(peak, live)
    assert found.peak_sequences() == peak > 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "nowhere: no such directory"),
        (["synthetic", "--policy", "lru"], "policy=lru: must be one of pb_lru, "),
        (["synthetic", "--device-slots", "12"], "device_slots=12: must be whole numbers 2048 "),
        (["synthetic", "--device-slots", "many"], "device_slots=many: whole numbers with commas"),
        (
            ["synthetic", "--policy", "sglang_hisparse", "--device-slots", "2048"],
            "policy=sglang_hisparse: serves none of these sizes: ",
        ),
        (["synthetic", "--requests", "0"], "requests=0: must be a whole number > 0; use 4"),
        (["synthetic", "--hash-buckets", "3"], "hash_buckets=3: must be a power of two"),
        (["synthetic", "--bucket-age", "days"], "bucket_age=days: must be one of admitted, "),
        ([], "the following arguments are required: TRACE"),
    ],
)
def test_refused_in_one_line(arguments, line, capsys):
    assert main(["replay", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"vllm-ula: {line}")
    assert err.count("\n") == 1


def test_an_empty_trace_is_refused(tmp_path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"vllm-ula: {tmp_path}: empty, so no trace\n"


def test_counts_are_of_calls_after_the_warm_up():
    workload = Workload(1, 1, min_prompt=2000, max_prompt=2001, outputs=32)
    statistics = Statistics(topk=64)
    source = Source(header(workload, statistics, 512), lambda: generate(workload, statistics), 1)
    whole, _ = compare(source, ("pb_lru",), (512,))
    rest, _ = compare(source, ("pb_lru",), (512,), skip_calls=17)
    assert whole[0].total.selected == 32 * 64
    assert rest[0].total.selected == 16 * 64
    assert np.isclose(whole[0].moved_bytes(source.header)[0], whole[0].total.fetched * 656)
