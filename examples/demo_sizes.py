"""How much the demo asks for: derived from the checkpoint's config.json alone."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from vllm_ula.capacity import GIB, ceil_to, floor_to, min_device_slots
from vllm_ula.models import Geometry, geometry

NUM_REQUESTS = 12
OUTPUT_TOKENS = 64
BLOCK_SIZE = 16  # vLLM's, for MLA on a CPU
ROW_ITEM_BYTES = 4  # float32 rows: rounding then decides no comparison
PROMPT_SELECTIONS = 12  # a prompt is this many times as long as what a token reads of it
HISTORY_OF_DEVICE = 8  # the device pool holds this fraction of all tokens


class DemoError(Exception):
    """The demo cannot go on; the message is one line for the person at the terminal."""


@dataclass(frozen=True)
class Sizes:
    """What is sent, and what holds it.

    Attributes:
        prompt_tokens: tokens of each prompt.
        vocabulary: token ids of prompts are below it.
        layers: the model's attention layers and what they keep.
    """

    prompt_tokens: int
    vocabulary: int
    layers: Geometry

    @property
    def request_tokens(self) -> int:
        """Prompt and output tokens of one request."""
        return self.prompt_tokens + OUTPUT_TOKENS

    @property
    def history(self) -> int:
        """Prompt and output tokens of all requests."""
        return NUM_REQUESTS * self.request_tokens

    @property
    def min_device_slots(self) -> int:
        """Device rows a decode step of all requests needs, D_min."""
        return min_device_slots(self.layers.topk, NUM_REQUESTS, BLOCK_SIZE)

    @property
    def device_slots(self) -> int:
        """Device rows of each layer, D."""
        return max(floor_to(self.history // HISTORY_OF_DEVICE, BLOCK_SIZE), self.min_device_slots)

    @property
    def num_blocks(self) -> int:
        """Logical blocks with which all requests run at once, and the null block."""
        return 1 + NUM_REQUESTS * (ceil_to(self.request_tokens, BLOCK_SIZE) // BLOCK_SIZE)

    @property
    def host_gib(self) -> float:
        """Host memory for the rows the device pool does not hold, rounded up to 0.0001 GiB."""
        host_slots = self.num_blocks * BLOCK_SIZE - self.device_slots
        host_bytes = host_slots * self.layers.row_bytes("auto", ROW_ITEM_BYTES)
        return math.ceil(host_bytes / GIB * 10_000) / 10_000

    @property
    def kv_space_gib(self) -> int:
        """Device memory in whole GiB that holds all logical blocks without UlaCache."""
        token_bytes = self.layers.row_bytes("auto", ROW_ITEM_BYTES) + self.layers.index_key_bytes
        return ceil_to(self.num_blocks * BLOCK_SIZE * token_bytes, GIB) // GIB

    def prompts(self) -> list[list[int]]:
        """Random token ids, the same in every run; no two prompts share a prefix."""
        rng = random.Random(0)
        return [
            [rng.randrange(self.vocabulary) for _ in range(self.prompt_tokens)]
            for _ in range(NUM_REQUESTS)
        ]


def sizes_for(checkpoint: Path) -> Sizes:
    """Sizes of a demo with this checkpoint.

    Raises:
        DemoError: it is no DSA checkpoint, or its context is too short for the demo.
    """
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text())
        layers = geometry(config)
        longest = int(config["max_position_embeddings"]) - OUTPUT_TOKENS
        vocabulary = int(config["vocab_size"])
    except OSError as error:
        raise DemoError(f"MODEL={checkpoint}: cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DemoError(f"MODEL={checkpoint}: no DSA checkpoint, {path}: {error!r}") from error
    # The first 256 ids: bytes in the tiny model, ordinary tokens elsewhere.
    sizes = Sizes(min(PROMPT_SELECTIONS * layers.topk, longest), min(vocabulary, 256), layers)
    if sizes.prompt_tokens <= layers.topk or sizes.history < 4 * sizes.device_slots:
        raise DemoError(
            f"MODEL={checkpoint}: {sizes.history} tokens are no 4 times the device pool of "
            f"{sizes.device_slots} rows (index_topk {layers.topk}); the demo needs a longer "
            f"max_position_embeddings than {config['max_position_embeddings']}"
        )
    return sizes
