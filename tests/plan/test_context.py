"""Lengths of requests, as given."""

import pytest

from vllm_ula.errors import ConfigError
from vllm_ula.plan.assumptions import Assumptions
from vllm_ula.plan.context import lengths_of


def read(context, output=0):
    notes = Assumptions()
    found = lengths_of(str(context), output, notes)
    return (found.shortest, found.mean, found.longest), [note.name for note in notes.taken]


@pytest.mark.parametrize(
    ("context", "tokens"),
    [("90145", 90_145), ("64k", 65_536), ("1m", 2**20), ("1.5K", 1536), ("8..8", 8)],
)
def test_one_length(context, tokens):
    assert read(context) == ((tokens,) * 3, [])


def test_output_is_part_of_a_request():
    assert read("88097", 2048)[0] == (90_145,) * 3


def test_a_range_is_log_uniform_and_says_so():
    found, notes = read("64k..128k", 2048)
    assert found == (65_536 + 2048, 94_548 + 2048, 131_072 + 2048)
    assert notes == ["lengths between", "length of a request"]


def test_a_histogram(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("tokens,count\n\n 1000, 3\n5000\t1  # a long one\n# none\n1000 1\n9000,0\n")
    assert read(file, 10) == ((1010, 1810, 5010), ["length of a request"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no request"),
        ("1000 0\n", "holds no request"),
        ("1000\n", ":1: is no line of two whole numbers"),
        ("1000 3\ntokens count\n", ":2: is no line of two whole numbers"),
        ("1000 -3\n", ":1: is no line of two whole numbers"),
        ("1000 1.5\n", ":1: is no line of two whole numbers"),
        ("0 3\n", ":1: 0 tokens are not possible"),
        ("a b c\n", "holds no request"),
    ],
)
def test_a_histogram_that_is_none_is_refused(tmp_path, content, said):
    file = tmp_path / "lengths"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("context", ["0", "0.5", "-5", "1..", "..5", "9..3", "5kk", "9999999999m"])
def test_lengths_that_are_none_are_refused(context):
    with pytest.raises(ConfigError, match="--context="):
        read(context)
