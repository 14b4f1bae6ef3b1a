"""Seeded sampling beside chunked prefill on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_ula.compat import VERSIONS
from vllm_ula.patches.record import Patch


def _keep_generators(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        """Draw nothing for tokens that are thrown away, so that there is nothing to rewind."""
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
        kept = {int(i): generators.pop(int(i)) for i in discarded if int(i) in generators}
        try:
            return original(self, grammar_output)
        finally:
            generators.update(kept)

    return sample_tokens


def _needed() -> bool:
    """Whether a CPU generator still cannot be rewound by an offset."""
    try:
        torch.Generator().get_offset()
    except RuntimeError:
        return True
    return False


PATCHES = (
    Patch(
        target="vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        attribute="sample_tokens",
        defined_in="vllm.v1.worker.gpu_model_runner",
        parameters=("self", "grammar_output"),
        replace=_keep_generators,
        versions=VERSIONS,
        why="the runner rewinds the generator of a request in the middle of its prompt by an "
        "offset, which CPU generators do not have: one seeded request longer than a chunk kills "
        "the engine",
        remove_when="vLLM does not call set_offset on CPU generators",
        needed=_needed,
    ),
)
