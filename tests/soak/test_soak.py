"""2,000 requests of every kind, aborted at every stage, under a pool of a quarter of the demand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine.harness import in_children
from soak.driver import MTP, NGRAM, Played, play_all, write_model
from soak.story import Ask, Stage, Story

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# The drafts of each engine, the story's seed and its requests: 2,000 in all.
STORIES: dict[str, tuple[dict[str, Any] | None, Story]] = {
    "MTP": (MTP, Story(1, 1000)),
    "n-gram": (NGRAM, Story(2, 200)),
    "none": (None, Story(3, 800, drafts=False)),
}
TOTALS: Counter[str] = Counter()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of all stories."""
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    return str(directory)


@pytest.mark.parametrize("name", STORIES)
def test_a_story_ends_the_same(name: str, tiny: str) -> None:
    """Tokens, logprobs and why each request ended; `play_all` holds what must hold at rest."""
    drafts, story = STORIES[name]
    arms = in_children(play_all, [(tiny, drafts, story, ula) for ula in (False, True)])
    without, found = arms
    assert different(found, without) == []
    for kind in without.counts:
        assert found.counts[kind] == without.counts[kind], kind
    TOTALS.update(found.counts)


def different(found: Played, expected: Played) -> list[int]:
    """Requests that ended differently."""
    pairs = zip(found.outputs, expected.outputs, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a != b]


def test_every_kind_happened_often_enough(capsys: pytest.CaptureFixture[str]) -> None:
    if TOTALS["requests"] != sum(story.num_requests for _, story in STORIES.values()):
        pytest.skip("counts all stories together")
    with capsys.disabled():
        print()
        for kind, count in sorted(TOTALS.items()):
            print(f"{count:8d} {kind}")
    assert TOTALS["requests"] >= 2000
    for stage in Stage:
        assert TOTALS[f"aborted {stage.value}"] >= 50, stage
    for ask in Ask:
        assert TOTALS[ask.value] >= 50, ask
    assert TOTALS["preemptions"] >= 50
    assert TOTALS["prefix hits on evicted blocks"] >= 50
    assert TOTALS["rejected drafts"] >= 200
    assert TOTALS["accepted drafts"] >= 200
