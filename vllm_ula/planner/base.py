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

    def choose(self, incoming: Tensor, num_optional: int = 0) -> DeviceSlots:
        """Choose victims for incoming rows; no recency and no death changes.

        Dead rows come first, then those used longest ago, as far as the planner can tell;
        current rows never. Rows that it cannot tell apart may be others when it is asked again.

        Args:
            incoming: int64 `[m]` logical slots that want a device row.
            num_optional: so many of them, at the end, get a dead row or none.

        Returns:
            n distinct device slots, `m - num_optional <= n <= m`, of which `slots[j]` goes to
            `incoming[j]`; valid until the next choice.

        Raises:
            NotEnoughVictims: fewer than `m - num_optional` rows are not current.
        """
        available = self.num_device - self.num_current()
        required = len(incoming) - num_optional
        if required > available:
            raise NotEnoughVictims(required, available)
        return DeviceSlots(self._coldest(incoming, required))

    @abstractmethod
    def _coldest(self, incoming: Tensor, required: int) -> Tensor:
        """`choose` where `required` rows are not current: int64 `[n]`."""

    @abstractmethod
    def num_current(self) -> int:
        """Rows the current call has touched or admitted."""

    @abstractmethod
    def dead(self) -> Tensor:
        """Rows buried and not admitted since: bool `[D]`."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError if the recency metadata contradicts itself."""
