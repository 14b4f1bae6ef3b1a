"""How long requests are: `--context` and `--output`.

    90145            every prompt has so many tokens
    64k..128k        prompts of these lengths; k is 1,024, m is 1,048,576
    FILE             a histogram: a line a length, its tokens and how many requests have it,

with a comma or blanks between, for example

    # tokens count
    65536 12
    100000 7

Empty lines, what follows a #, and a first line of words are skipped. Lengths may stand in any
order and more than once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_ula.errors import ConfigError
from vllm_ula.plan.assumptions import Assumptions

_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_WORKS = "90145, 64k..128k, or a file of lines `tokens count`"
_MOST = 2**40  # tokens; beyond is a slip of the pen


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request at its end, prompt and output.

    Attributes:
        shortest: of all requests.
        mean: by which requests are admitted: full memory holds requests of this length on average.
        longest: of all requests.
    """

    shortest: int
    mean: int
    longest: int

    @property
    def all(self) -> tuple[int, ...]:
        """Each length once, ascending."""
        return tuple(sorted({self.shortest, self.mean, self.longest}))


def lengths_of(context: str, output: int, assumptions: Assumptions) -> Lengths:
    """Read `--context`.

    Args:
        context: a length, a range, or the path of a histogram.
        output: tokens generated per request, added to every prompt.
        assumptions: gets the distribution over a range.

    Raises:
        ConfigError: it is none of these, or a length or a count is not possible.
        OSError: the file cannot be read.
    """
    low, dots, high = context.partition("..")
    if _LENGTH.fullmatch(low) and (not dots or _LENGTH.fullmatch(high)):
        first, last = _length(context, low), _length(context, high or low)
        if first > last:
            raise ConfigError("--context", context, "its second length is smaller", _WORKS)
        mean = first
        if first < last:
            mean = round((last - first) / math.log(last / first))
            why = "every octave as likely as the next, as in `vllm-ula replay synthetic`"
            assumptions.take("lengths between", f"log-uniform, mean {mean:,}", why)
    elif Path(context).is_file():
        first, mean, last = _histogram(Path(context))
    else:
        raise ConfigError("--context", context, "is no length, no range and no file", _WORKS)
    found = Lengths(first + output, mean + output, last + output)
    if found.shortest < found.longest:
        why = "its prompt and all of its output; admission counts requests of the mean length"
        assumptions.take("length of a request", f"{found.mean:,} tokens on average", why)
    return found


def _length(context: str, text: str) -> int:
    number, unit = _LENGTH.fullmatch(text).groups()  # type: ignore[union-attr]
    tokens = float(number) * _UNITS[unit.lower()]
    if not 1 <= tokens <= _MOST or tokens != int(tokens):
        rule = f"{text} is no whole number of tokens from 1 to {_MOST}"
        raise ConfigError("--context", context, rule, _WORKS)
    return int(tokens)


def _histogram(path: Path) -> tuple[int, int, int]:
    """Shortest, mean and longest prompt of a file."""
    counts: dict[int, int] = {}
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words or (not counts and all(not word[0].isdigit() for word in words)):
            continue
        where = f"{path}:{number}"
        if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
            rule = "is no line of two whole numbers, tokens and count"
            raise ConfigError("--context", where, rule, "65536 12")
        tokens, count = int(words[0]), int(words[1])
        if not 1 <= tokens <= _MOST:
            raise ConfigError("--context", where, f"{tokens} tokens are not possible", "65536 12")
        counts[tokens] = counts.get(tokens, 0) + count
    counts = {tokens: count for tokens, count in counts.items() if count}
    if not counts:
        raise ConfigError("--context", path, "holds no request", "lines such as 65536 12")
    total = sum(tokens * count for tokens, count in counts.items())
    return min(counts), round(total / sum(counts.values())), max(counts)
