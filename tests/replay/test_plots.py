"""The pictures: written, and refused in one line."""

import sys
from itertools import pairwise

import pytest

from vllm_ula.errors import UlaError
from vllm_ula.replay.plots import HitRate, PlanTime, hit_rates, plan_times

PNG = b"\x89PNG\r\n\x1a\n"


def test_pictures_are_written_into_new_folders(tmp_path):
    rates = [HitRate(policy, share, 60.0 + share) for policy in "ab" for share in (5, 10, 20)]
    hit_rates(tmp_path / "new" / "hits.png", rates, "hits")
    times = [PlanTime(p, 2**e, 10.0 * e) for p in "abcdefgh" for e in (16, 18)]
    plan_times(tmp_path / "new" / "times.png", times, "times")
    assert (tmp_path / "new" / "hits.png").read_bytes().startswith(PNG)
    assert (tmp_path / "new" / "times.png").read_bytes().startswith(PNG)


def test_labels_stand_apart(tmp_path, monkeypatch):
    from vllm_ula.replay import plots

    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    # All lines end in the same point, at the top.
    plots.hit_rates(tmp_path, [HitRate(p, 5, 100.0) for p in "abcd"], "hits")
    heights = sorted(text.xyann[1] for text in drawn[0].axes[0].texts)
    assert all(b - a > 0.05 for a, b in pairwise(heights))


def test_no_points(tmp_path):
    with pytest.raises(UlaError, match="nothing to draw for 'hits'"):
        hit_rates(tmp_path / "x.png", [], "hits")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UlaError, match=r"pip install 'vllm-ula\[plots\]'"):
        plan_times(tmp_path / "x.png", [PlanTime("a", 1, 1)], "times")
