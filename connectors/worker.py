"""The worker half: pools, maps and planners of a rank, and the layers that use them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.logger import init_logger

from vllm_ula.attention.impl import UlaSparseMlaImpl
from vllm_ula.attention.store import RowStore
from vllm_ula.block_manager import UlaKVCacheConfig
from vllm_ula.compat import ula_config
from vllm_ula.config import check_every_step
from vllm_ula.connectors.recorder import Recorder, make_recorder
from vllm_ula.connectors.records import UlaConnectorMetadata
from vllm_ula.metrics import UlaStats
from vllm_ula.planning import Planning
from vllm_ula.planning.make import planning_maker, plans_with_kernels
from vllm_ula.pools import HostPool
from vllm_ula.records import LayerRows
from vllm_ula.step import Domain, prepare
from vllm_ula.streams import make_lane, upload

logger = init_logger("vllm.vllm_ula")

ROW_COUNT_SECONDS = 0.25


class UlaWorker:
    """Everything UlaCache keeps on one rank.

    Args:
        vllm_config: of the engine.
        kv_cache_config: the rank's logical blocks and pools.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: UlaKVCacheConfig) -> None:
        assert kv_cache_config.capacity is not None
        self._vllm_config = vllm_config
        self._capacity = kv_cache_config.capacity
        self._config = ula_config(vllm_config)
        self._check_every_step = check_every_step()
        self._layers = vllm_config.compilation_config.static_forward_context
        self._impls: list[UlaSparseMlaImpl] = []
        self._serving = False
        self._next_row_count = 0.0
        self._num_leases = 0
        self._recorder: Recorder | None = None
        self.domains: list[Domain] = []
        self.pool: HostPool | None = None

    def register(self, kv_caches: dict[str, Tensor]) -> None:
        """Build a domain per index group and put its layers behind it.

        Args:
            kv_caches: device caches by layer name, `[D / block_size, 1, block_size, width]` for
                rows; index keys are left to the indexer. Layers of a group are in order.

        Raises:
            HostMemoryError: the host pool could not be allocated. What was taken is given back.
            TraceError: the directory of `record` cannot take a trace.
        """
        try:
            self._build(kv_caches)
        except BaseException:
            self._release()
            # vLLM keeps this connector, and its settings, for the process's next engine otherwise.
            ensure_kv_transfer_shutdown()
            raise

    def _build(self, kv_caches: dict[str, Tensor]) -> None:
        impls = {
            name: impl
            for name in kv_caches
            if isinstance(impl := getattr(self._layers[name], "impl", None), UlaSparseMlaImpl)
        }
        device = {name: kv_caches[name].flatten(0, -2) for name in impls}
        row_bytes = [rows.shape[1] * rows.element_size() for rows in device.values()]
        num_device, num_host = self._capacity.device_slots, self._capacity.host_slots
        on = next(iter(device.values())).device
        self.pool = HostPool(num_host, row_bytes, on)
        make_planning = self._planning_maker(num_device, num_host, on)
        lane = make_lane(on)
        group: object = None
        for index, (name, impl) in enumerate(impls.items()):
            if impl.index_group_index == 0:
                self.domains.append(Domain(make_planning(), [], lane))
                group = impl.index_group
            # Layers of a group are neighbours: its homes lie in scratch memory until the next one.
            assert impl.index_group is group
            domain = self.domains[-1]
            assert len(domain.layers) == impl.index_group_index
            host = self.pool.rows(index, device[name].dtype)
            domain.layers.append(LayerRows(name, device[name], host))
            self._impls.append(impl)
        self._recorder = make_recorder(
            self._vllm_config, self._config, self._capacity, self.domains
        )
        for domain in self.domains:
            prepare(domain)
        self._bind()

    def _bind(self) -> None:
        """Put every layer behind its domain."""
        impls = iter(self._impls)
        for number, domain in enumerate(self.domains):
            record = None
            if self._recorder is not None:
                record = functools.partial(self._recorder.call, number)
            for layer in range(len(domain.layers)):
                next(impls).bind(RowStore(domain, layer, self.serving, record))

    def _planning_maker(
        self, num_device: int, num_host: int, device: torch.device
    ) -> Callable[[], Planning]:
        start = time.perf_counter()
        maker = planning_maker(self._config, num_device, num_host, device)
        seconds, planner = time.perf_counter() - start, self._config.planner
        how = "in kernels" if plans_with_kernels(device) else f"compiled in {seconds:.1f} s"
        logger.info("UlaCache: planner %s %s", planner, how)
        return maker

    def serving(self) -> bool:
        """Whether the current forward call serves requests rather than warming up."""
        return self._serving

    def begin_step(self, metadata: UlaConnectorMetadata) -> None:
        """Apply deaths before anything of the step is written."""
        self._serving = True
        self._num_leases = metadata.num_leases
        if self._recorder is not None and metadata.sequences is not None:
            self._recorder.begin_step(metadata.sequences, metadata.dead_blocks)
        if metadata.dead_blocks:
            blocks = torch.tensor(metadata.dead_blocks, dtype=torch.int64)
            blocks = upload(blocks, self.domains[0].residency.home.device)
            for domain in self.domains:
                domain.planning.bury(blocks, self._capacity.block_size)

    def end_step(self) -> None:
        """The step's forward calls are done."""
        self._serving = False
        if self._check_every_step:
            self.check_integrity()

    def stats(self) -> UlaStats:
        """What happened since the last call.

        Rows are counted at rest and a few times a second; on a GPU, which it has to wait for, a few
        times a minute.
        """
        now = time.monotonic()
        lag = any(domain.planning.counts_lag for domain in self.domains)
        at_rest = not lag and not any(domain.counts.selected for domain in self.domains)
        with_rows = at_rest or now >= self._next_row_count
        if with_rows:
            self._next_row_count = now + ROW_COUNT_SECONDS * (60 if lag else 1)
        return UlaStats.collect(self.domains, self._num_leases, with_rows)

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant does not hold in some domain."""
        for domain in self.domains:
            domain.check_integrity()

    def close(self) -> None:
        """Check the maps a last time, then give the host pool back."""
        if self.pool is None:
            return
        try:
            self.check_integrity()
            logger.info("UlaCache: integrity of %d domains holds at shutdown", len(self.domains))
        finally:
            self._release()

    def _release(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        for impl in self._impls:
            impl.bind(None)
        self._impls.clear()
        self.domains.clear()
        if self.pool is not None:
            self.pool.close()
            self.pool = None
