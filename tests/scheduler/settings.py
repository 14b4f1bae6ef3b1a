"""What a story runs on, and vLLM's configuration of it: no model is loaded."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec

from vllm_ula.block_manager import UlaKVCacheConfig
from vllm_ula.planner.pb_lru import PbLru
from vllm_ula.planner.stamps import StampPlanner
from vllm_ula.tiny_model import TinyModelOptions
from vllm_ula.tiny_model.checkpoint import model_config


@dataclass(frozen=True)
class Settings:
    """Sizes of both halves and ways to schedule.

    Attributes:
        blocks: logical blocks, the null block included.
        device_blocks: of these, how many the device has rows for.
        lag: steps scheduled before the output of the first of them is known; 0 is vLLM's
            synchronous scheduler, 1 what its engine core does with asynchronous scheduling.
        drafts: draft tokens per step.
        method: who drafts; "mtp" reserves lookahead slots and gives up the last block of a hit.
        tokens: scheduled in one step at most.
        chunked: whether a prompt may take several steps.
        deferred: whether freed blocks wait for the steps in flight, as behind our connector.
        new_runner: resumed requests come as new ones, which is what vLLM's runner V2 gets.
        topk: positions a token selects.
    """

    blocks: int = 17
    block_size: int = 4
    device_blocks: int = 6
    lag: int = 0
    drafts: int = 0
    method: str = "ngram"
    requests: int = 4
    tokens: int = 32
    policy: str = "fcfs"
    chunked: bool = True
    caching: bool = True
    deferred: bool = True
    new_runner: bool = False
    topk: int = 6
    planner: Callable[[int], StampPlanner] = PbLru

    @property
    def num_device(self) -> int:
        return self.device_blocks * self.block_size

    @property
    def max_len(self) -> int:
        """A request may fill the whole pool, as vLLM's admission check allows."""
        return (self.blocks - 1) * self.block_size

    @property
    def num_host(self) -> int:
        return (self.blocks - self.device_blocks) * self.block_size


@functools.cache
def _model_directory() -> tempfile.TemporaryDirectory[str]:
    """A DSA model's config.json, which is all that is read here; kept for the process."""
    directory = tempfile.TemporaryDirectory()
    config = model_config(TinyModelOptions(mtp=1))
    (Path(directory.name) / "config.json").write_text(json.dumps(config))
    return directory


@functools.cache
def _base() -> VllmConfig:
    """Any configuration of the model; what the scheduler looks at is set per story."""
    model = ModelConfig(_model_directory().name, dtype="float32", skip_tokenizer_init=True)
    return VllmConfig(model_config=model, cache_config=CacheConfig(block_size=16))


def vllm_config(settings: Settings) -> VllmConfig:
    """What vLLM's scheduler is constructed from."""
    config = copy.copy(_base())
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = settings.max_len
    config.scheduler_config = SchedulerConfig(
        max_num_seqs=settings.requests,
        max_num_batched_tokens=settings.tokens if settings.chunked else settings.max_len,
        max_model_len=settings.max_len,
        enable_chunked_prefill=settings.chunked,
        policy=settings.policy,
        async_scheduling=settings.lag > 0,
        is_encoder_decoder=False,
    )
    config.cache_config = CacheConfig(block_size=16, enable_prefix_caching=settings.caching)
    config.cache_config.block_size = settings.block_size
    config.cache_config.num_gpu_blocks = settings.blocks
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="UlaConnector",
        kv_connector_module_path="vllm_ula.connectors.ula",
        kv_role="kv_both" if settings.deferred else "kv_producer",
        kv_connector_extra_config={"record": "nowhere"},  # the scheduler half follows requests
    )
    if settings.drafts:
        config.speculative_config = SpeculativeConfig(
            method=settings.method,
            num_speculative_tokens=settings.drafts,
            prompt_lookup_max=2 if settings.method == "ngram" else None,
            target_model_config=config.model_config,
            target_parallel_config=ParallelConfig(),
        )
    return config


def kv_cache_config(settings: Settings) -> UlaKVCacheConfig:
    """Logical blocks of one group of layers."""
    spec = MLAAttentionSpec(
        block_size=settings.block_size, num_kv_heads=1, head_size=2, dtype=torch.int64
    )
    return UlaKVCacheConfig(
        num_blocks=settings.blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layers.0", "layers.1"], spec)],
    )
