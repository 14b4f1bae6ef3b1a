"""The contract every planner keeps: recency of device rows, and which of them to give up."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from vllm_ula.errors import NotEnoughVictims
from vllm_ula.records import DeviceSlots


class Planner(ABC):
    """Recency of the device rows of one domain.

    A planner knows device slots only: not what lives in them, not what is dead. Both are
    arguments, so that choosing never depends on state somebody else keeps up to date.

    Args:
        num_device: device rows D, > 0.
        device: where the recency metadata lives.
    """

    bytes_per_device_slot: int

    def __init__(self, num_device: int, device: torch.device | str = "cpu") -> None:
        self.num_device = num_device
        self.device = torch.device(device)

    @abstractmethod
    def begin_call(self) -> None:
        """A forward call starts: rows touched from here on are more recent than all before."""

    @abstractmethod
    def touch(self, slots: DeviceSlots) -> None:
        """The current call uses these rows where they are. They become the most recent ones."""

    @abstractmethod
    def admit(self, slots: DeviceSlots) -> None:
        """The current call puts new bytes into these rows, fetched or written: touched, and new."""

    def choose(self, num: int, dead: Tensor, protected: Tensor) -> DeviceSlots:
        """Choose exactly `num` distinct victims; changes nothing.

        Dead rows come first, then the rows used longest ago; protected rows never.

        Args:
            num: victims wanted.
            dead: bool `[D]`, rows that may be overwritten without a copy.
            protected: bool `[D]`, rows the current call uses.

        Returns:
            `num` device slots in the order in which they should be given up.

        Raises:
            NotEnoughVictims: fewer than `num` rows are unprotected.
        """
        available = self.num_device - int(protected.sum())
        if num > available:
            raise NotEnoughVictims(num, available)
        if num == 0:
            return DeviceSlots(torch.empty(0, dtype=torch.int64, device=self.device))
        return DeviceSlots(self._coldest(num, dead, protected))

    @abstractmethod
    def _coldest(self, num: int, dead: Tensor, protected: Tensor) -> Tensor:
        """`choose` for `0 < num <= unprotected rows`: int64 `[num]`."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError if the recency metadata contradicts itself."""
