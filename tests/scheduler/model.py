"""A model that is nothing but a hash: what each row must hold, and what is sampled after it.

The row of a token carries a hash of all tokens up to it, its tag, so two rows are equal exactly
where one may stand for the other, and a prefix-cache hit that reads anything else is seen. Tokens
are sampled from the same hash: whatever happens to a request, its completion is known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

VOCABULARY = 50
ROOT = 1  # tag before the first token


def root_of(salt: str | None) -> int:
    """Tag before the first token of a request; requests with other salts share no row."""
    return ROOT if salt is None else tag_after(ROOT, 1000 + sum(salt.encode()))


def tag_after(tag: int, token: int) -> int:
    """Tag of a token's row, from the tag of the row before it."""
    return (tag * 1_000_003 + token + 7) % (2**61 - 1)


def tags_of(tokens: Sequence[int], root: int = ROOT) -> list[int]:
    """Tags of the rows of a sequence."""
    return list(accumulate(tokens, tag_after, initial=root))[1:]


def next_token(tag: int) -> int:
    """What the model samples after the row with this tag."""
    return (tag >> 11) % VOCABULARY


def completion(prompt: Sequence[int], root: int, most: int, stop: int | None) -> list[int]:
    """What the model says after a prompt when it runs alone and undisturbed."""
    tag, tokens = tags_of(prompt, root)[-1], list[int]()
    while len(tokens) < most and (not tokens or tokens[-1] != stop):
        tokens.append(next_token(tag))
        tag = tag_after(tag, tokens[-1])
    return tokens


def verify(lineage: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The drafts that are right, and the token after them.

    Args:
        lineage: tags of the rows up to the last draft's.
        drafts: the last tokens of these rows.
    """
    verified = lineage[len(lineage) - len(drafts) - 1 :]
    sampled = [next_token(verified[0])]
    for draft, tag in zip(drafts, verified[1:], strict=True):
        if draft != sampled[-1]:
            break
        sampled.append(next_token(tag))
    return sampled


def propose(tag: int, num: int, right: int) -> list[int]:
    """Drafts after a row, of which exactly the first `right` will be accepted."""
    drafts = list[int]()
    for i in range(num):
        token = next_token(tag)
        drafts.append(token if i < right else (token + 1) % VOCABULARY)
        tag = tag_after(tag, drafts[-1])
    return drafts
