"""The contract every planner keeps: recency of device rows, and which of them to give up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from torch import Tensor

from vllm_ula.errors import NotEnoughVictims
from vllm_ula.records import DeviceSlots


class BucketAge(Enum):
    """What ends a period of PB-LRU, always between two calls."""

    CALLS = "calls"
    TOUCHED = "touched"
    ADMITTED = "admitted"


class Planner(ABC):
    """Recency of the device rows of one domain (paper section 5.1).

    Between two `begin_call` lies one forward call. Rows it touches or admits are *current* and no
    victims until the next one begins.

    Args:
        num_device: device rows D, > 0.
    """

    def __init__(self, num_device: int) -> None:
        self.num_device = num_device

    @abstractmethod
    def begin_call(self) -> None:
        """A forward call starts: rows touched from here on are more recent than all before."""

    @abstractmethod
    def touch(self, slots: DeviceSlots) -> None:
        """The current call uses these rows where they are."""

    @abstractmethod
    def admit(self, slots: DeviceSlots, owners: Tensor) -> None:
        """The current call puts new bytes into distinct rows: touched, and dead no longer.

        Args:
            slots: m device rows.
            owners: int64 `[m]` logical slots that live in them from now on.
        """

    @abstractmethod
    def bury(self, slots: DeviceSlots) -> None:
        """What lives in these rows is dead: they may be overwritten without a copy."""

    def choose(self, incoming: Tensor) -> DeviceSlots:
        """Choose a victim for each incoming row; changes nothing that can be seen.

        Dead rows come first, then those used longest ago, as far as the planner can tell;
        current rows never.

        Args:
            incoming: int64 `[m]` logical slots that want a device row.

        Returns:
            m distinct device slots, of which `slots[j]` goes to `incoming[j]`.

        Raises:
            NotEnoughVictims: fewer than m rows are not current.
        """
        available = self.num_device - self.num_current()
        if len(incoming) > available:
            raise NotEnoughVictims(len(incoming), available)
        return DeviceSlots(self._coldest(incoming))

    @abstractmethod
    def _coldest(self, incoming: Tensor) -> Tensor:
        """`choose` for at most as many rows as are not current: int64 `[m]`."""

    @abstractmethod
    def num_current(self) -> int:
        """Rows the current call has touched or admitted."""

    @abstractmethod
    def dead(self) -> Tensor:
        """Rows buried and not admitted since: bool `[D]`."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError if the recency metadata contradicts itself."""
