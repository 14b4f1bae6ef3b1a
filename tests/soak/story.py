"""A seeded story: which requests arrive at which step, what they ask for, when they are aborted."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Stage(Enum):
    """Where in its life a request is aborted."""

    QUEUED = "queued"
    MID_PREFILL = "mid-prefill"
    MID_DECODE = "mid-decode"
    VERIFYING = "during verification"
    FINISHED = "after the last token"
    DISCONNECT = "client disconnect"


class Ask(Enum):
    """What a request asks of the sampler and of the front end."""

    GREEDY = "greedy"
    SAMPLED = "seeded sampling"
    TWO = "n = 2"
    STOP = "stop string"
    IGNORE_EOS = "ignore_eos"
    STRUCTURED = "structured output"


MAX_PROMPT = 180
PREFIXES, ABORTED = 12, 0.45  # documents in circulation; share of requests that are aborted
CHOICES = ["alpha beta", "gamma delta epsilon", "zeta"]


@dataclass(frozen=True)
class Request:
    """One request of a story.

    Attributes:
        arrives: step at which it is sent.
        prompt: tokens.
        sampling: arguments of SamplingParams.
        priority: lower is earlier, under priority scheduling.
        abort: stage at which it is aborted, if ever.
    """

    arrives: int
    prompt: list[int]
    ask: Ask
    sampling: dict[str, Any]
    priority: int
    abort: Stage | None


@dataclass
class Story:
    """Requests in order of arrival."""

    seed: int
    num_requests: int
    drafts: bool = True
    requests: list[Request] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        documents = [_text(rng, rng.randrange(32, 96)) for _ in range(PREFIXES)]
        self.requests = []
        step = 0
        while len(self.requests) < self.num_requests:
            burst = rng.choice((1, 1, 2, 3, 20))  # 20 at once: more than max_num_seqs
            for _ in range(min(burst, self.num_requests - len(self.requests))):
                self.requests.append(self._request(rng, step, documents))
            step += rng.randrange(1, 2 + burst)
            if rng.random() < 0.1:
                documents[rng.randrange(PREFIXES)] = _text(rng, rng.randrange(32, 96))

    def _request(self, rng: random.Random, step: int, documents: list[list[int]]) -> Request:
        prompt = rng.choice(documents) + _text(rng, rng.randrange(1, 40))
        stages = [s for s in Stage if self.drafts or s is not Stage.VERIFYING]
        abort = rng.choice(stages) if rng.random() < ABORTED else None
        # A request to be aborted in the middle is long enough to have one.
        ask = rng.choice(list(Ask)) if abort is None else rng.choice((Ask.GREEDY, Ask.SAMPLED))
        output = rng.randrange(1, 40) if abort in (None, Stage.FINISHED) else 40
        sampling: dict[str, Any] = {"max_tokens": output, "temperature": 0.0, "logprobs": 0}
        if ask in (Ask.SAMPLED, Ask.TWO):
            sampling |= {"temperature": 1.0, "seed": rng.randrange(2**31)}
        sampling |= {
            Ask.TWO: {"n": 2},
            Ask.STOP: {"stop": [rng.choice(string.ascii_letters) for _ in range(6)]},
            Ask.IGNORE_EOS: {"ignore_eos": True},
        }.get(ask, {})
        return Request(step, prompt[:MAX_PROMPT], ask, sampling, rng.randrange(3), abort)


def _text(rng: random.Random, length: int) -> list[int]:
    """Runs of letters the tiny model likes to continue, so that drafts are accepted, and noise."""
    tokens: list[int] = []
    while len(tokens) < length:
        start = rng.randrange(26)
        tokens += (string.ascii_lowercase * 2)[start : start + rng.randrange(4, 16)].encode()
        tokens += [rng.randrange(256) for _ in range(rng.randrange(6))]
    return tokens[:length]
