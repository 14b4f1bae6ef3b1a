"""The map of one domain: where each logical slot lives (paper section 4.1).

    home[l] in [0, D)        device slot home[l]
    home[l] in [D, D + H)    host slot home[l] - D
    owner[d]                 the logical slot that lives in device slot d

`home` is a permutation of `range(D + H)`: every logical slot has exactly one home and every row
exactly one logical slot, dead or live. `translate` reads the map, `remap` is its only writer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_ula.arrays import filled
from vllm_ula.errors import IntegrityError
from vllm_ula.kernels import dispatch
from vllm_ula.records import DeviceSlots, Exchange, HostSlots, RowStates


class Residency:
    """Homes and liveness of `num_device + num_host` logical slots.

    Args:
        num_device: device rows D, > 0.
        num_host: host rows H, >= 0.
        device: where the map lives.
    """

    def __init__(self, num_device: int, num_host: int, device: torch.device | str = "cpu") -> None:
        self.num_device = num_device
        self.num_host = num_host
        self.home = _slots(num_device + num_host, torch.int32, device)
        self.owner = _slots(num_device, torch.int32, device)
        self.live = _slots(num_device + num_host, torch.bool, device).zero_()

    @property
    def num_logical(self) -> int:
        """Logical slots N = D + H."""
        return self.num_device + self.num_host

    def translate(self, slots: Tensor) -> Tensor:
        """Homes of logical slots.

        Args:
            slots: int64, any shape; -1 is no slot.

        Returns:
            int64 homes of the same shape, -1 where there is no slot. Valid until the next `remap`.
        """
        return dispatch.translate(self.home, slots)

    def homes(self, slots: Tensor) -> Tensor:
        """`translate` for int64 `[m]` slots that are all there."""
        return self.home.index_select(0, slots).long()

    def host_slots(self, homes: Tensor) -> HostSlots:
        """Host slots of homes that are all on the host."""
        return HostSlots(homes - self.num_device)

    def owners(self, slots: DeviceSlots) -> Tensor:
        """Logical slots int64 `[m]` living in these device rows."""
        return self.owner[slots.index].long()

    def dead_device_rows(self) -> Tensor:
        """Which device rows may be overwritten without a copy: bool `[D]`."""
        return self.live.index_select(0, self.owner).logical_not_()

    def remap(self, exchange: Exchange) -> None:
        """Swap the homes of the incoming rows and the victims' rows; the bytes have moved."""
        if not len(exchange):
            return
        victims = exchange.victims.index
        outgoing = self.owner[victims].long()
        self.home[outgoing] = (exchange.vacated.index + self.num_device).to(torch.int32)
        self.home[exchange.incoming] = victims.to(torch.int32)
        self.owner[victims] = exchange.incoming.to(torch.int32)

    def mark_live(self, slots: Tensor) -> None:
        """These logical slots (int64 `[m]`) were written: somebody may read them."""
        self.live[slots] = True

    def mark_dead(self, blocks: Tensor, block_size: int) -> None:
        """Nobody reads these blocks (int64 `[m]`) again before writing them."""
        self.live.view(-1, block_size)[blocks] = False

    def states(self) -> RowStates:
        """Count live and dead rows of each tier."""
        live = int(self.live.sum())
        device_live = int(self.live.index_select(0, self.owner).sum())
        host_live = live - device_live
        return RowStates(
            device_live=device_live,
            device_dead=self.num_device - device_live,
            host_live=host_live,
            host_dead=self.num_host - host_live,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the map is a permutation and `owner` its inverse."""
        if len({self.home.numel(), self.live.numel(), self.num_logical}) != 1:
            raise IntegrityError(
                f"home has {self.home.numel()} and live {self.live.numel()} entries, "
                f"not {self.num_logical}"
            )
        if self.owner.numel() != self.num_device:
            raise IntegrityError(f"owner has {self.owner.numel()} entries, not {self.num_device}")
        homes = torch.sort(self.home).values
        every = torch.arange(self.num_logical, dtype=torch.int32, device=homes.device)
        if not torch.equal(homes, every):
            raise IntegrityError("home is no permutation of the device and host rows")
        on_device = (self.home < self.num_device).nonzero().squeeze(1)
        if not torch.equal(self.owner[self.home[on_device].long()].long(), on_device):
            raise IntegrityError("owner is not the inverse of home on the device rows")


def _slots(num: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """0, 1, 2, ..., in host memory on huge pages."""
    if torch.device(device).type != "cpu":
        return torch.arange(num, device=device).to(dtype)
    slots = torch.from_numpy(filled(num * dtype.itemsize, 0, np.uint8)).view(dtype)
    return torch.arange(num, out=slots) if dtype is torch.int32 else slots
