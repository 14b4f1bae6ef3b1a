"""The load: all prompts at once through the OpenAI client, and what the server tells meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from examples.demo_server import MODEL_NAME, Server
from examples.demo_sizes import OUTPUT_TOKENS, DemoError, Sizes

SAMPLE_S = 0.25
NUM_LOGPROBS = 20
REQUEST_TIMEOUT_S = 600.0

Metrics = dict[str, float]


@dataclass(frozen=True)
class Token:
    """One sampled token.

    Attributes:
        id: token id.
        logprobs: the likeliest tokens at its position and itself, id -> logprob.
    """

    id: int
    logprobs: dict[int, float]


@dataclass(frozen=True)
class Sample:
    """The server at one moment.

    Attributes:
        seconds: since the first request was sent.
        running: requests in the batch.
        device_live: rows per layer on the device that somebody may still read.
        host_live: the same on the host.
    """

    seconds: float
    running: float
    device_live: float
    host_live: float


@dataclass(frozen=True)
class Run:
    """What came of the load.

    Attributes:
        completions: tokens of each request, in the order of the prompts.
        samples: four a second, in order.
        metrics: after the last request, see `read_metrics`.
        seconds: from the first request sent to the last token received.
    """

    completions: list[list[Token]]
    samples: list[Sample]
    metrics: Metrics
    seconds: float


def send_all(server: Server, sizes: Sizes, title: str) -> Run:
    """Send all prompts at once and wait for all completions.

    Args:
        server: ready.
        sizes: prompts and their length.
        title: of the progress bar, which appears on terminals only.

    Raises:
        DemoError: a request failed, or its answer has not the tokens asked for.
    """
    try:
        return asyncio.run(_send_all(server, sizes, title))
    except (openai.OpenAIError, OSError) as error:
        raise DemoError(f"a request failed: {error!r}") from error


async def _send_all(server: Server, sizes: Sizes, title: str) -> Run:
    samples: list[Sample] = []
    sampler = asyncio.create_task(_sample(server.url, samples))
    client = openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0
    )
    start = time.monotonic()
    # Without a terminal (disable=None) there is no bar.
    with tqdm(total=sizes.history, desc=title, unit="tok", disable=None, leave=False) as bar:
        async with client:
            completions = await asyncio.gather(
                *(_complete(client, prompt, bar) for prompt in sizes.prompts())
            )
    seconds = time.monotonic() - start
    metrics = await _settled_metrics(server.url)
    await asyncio.sleep(4 * SAMPLE_S)  # the last samples show that nothing runs any more
    sampler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sampler
    return Run(completions, samples, metrics, seconds)


async def _complete(client: openai.AsyncOpenAI, prompt: list[int], bar: Any) -> list[Token]:
    """One greedy completion; the bar moves by the prompt with the first token, then by tokens."""
    stream = await client.completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        logprobs=NUM_LOGPROBS,
        stream=True,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
    )
    tokens: list[Token] = []
    async for chunk in stream:
        for logprobs in (choice.logprobs for choice in chunk.choices):
            if logprobs is None or not logprobs.tokens:
                continue
            bar.update(len(logprobs.tokens) + (0 if tokens else len(prompt)))
            top = logprobs.top_logprobs or []
            tokens += [
                Token(_token_id(token), {_token_id(t): value for t, value in likely.items()})
                for token, likely in zip(logprobs.tokens, top, strict=True)
            ]
    if len(tokens) != OUTPUT_TOKENS:
        raise DemoError(f"a completion has {len(tokens)} tokens instead of {OUTPUT_TOKENS}")
    return tokens


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


async def _sample(url: str, samples: list[Sample]) -> None:
    start = time.monotonic()
    while True:
        with contextlib.suppress(OSError):  # a busy server may miss one
            values = await asyncio.to_thread(read_metrics, url)
            samples.append(
                Sample(
                    time.monotonic() - start,
                    values["num_requests_running"],
                    values.get("ula_rows.device.live", 0),
                    values.get("ula_rows.host.live", 0),
                )
            )
        await asyncio.sleep(SAMPLE_S)


async def _settled_metrics(url: str) -> Metrics:
    """Metrics once the server knows that nothing runs any more."""
    for _ in range(40):
        values = await asyncio.to_thread(read_metrics, url)
        if values["num_requests_running"] == 0:
            return values
        await asyncio.sleep(SAMPLE_S)
    raise DemoError("the server still counts running requests after the last token")


def read_metrics(url: str) -> Metrics:
    """Values at /metrics, of vLLM's engine 0.

    Returns:
        By name without `vllm:`, tier and state appended: `ula_rows.device.live`.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [sample.labels[key] for key in ("tier", "state") if key in sample.labels]
            values[".".join([sample.name.removeprefix("vllm:"), *labels])] = sample.value
    return values
