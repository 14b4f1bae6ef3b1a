"""The small frozen records the stages of a step exchange.

Slots of the two tiers are typed, so that a host slot can never be used as a device slot: both are
small integers, and mixing them up reads somebody else's row without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceSlots:
    """Rows of the device pool: int64 `[m]`, each in `[0, D)`."""

    index: Tensor

    def __len__(self) -> int:
        return self.index.numel()


@dataclass(frozen=True, slots=True)
class HostSlots:
    """Rows of the host pool: int64 `[m]`, each in `[0, H)`."""

    index: Tensor

    def __len__(self) -> int:
        return self.index.numel()


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The rows of one attention layer, one tensor a tier.

    Attributes:
        name: vLLM's name of the layer.
        device: `[D, width]` rows in device memory.
        host: `[H, width]` rows in host memory, of the same dtype.
    """

    name: str
    device: Tensor
    host: Tensor

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.device.shape[1] * self.device.element_size()


@dataclass(frozen=True, slots=True)
class Call:
    """What one forward call asks of a domain.

    Attributes:
        written: int64 `[W]` distinct logical slots this call writes, -1 for tokens that write
            nothing.
        written_by_decode: bool `[W]`, true where a decode token writes the row.
        selection: int64 `[T, topk]` logical slots each query token reads, -1 padded.
        decode: bool `[T]`, true for the decode tokens.
    """

    written: Tensor
    written_by_decode: Tensor
    selection: Tensor
    decode: Tensor


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the rows of a call live, frozen until the domain's next step.

    Attributes:
        written: int64 `[W]`, of `Call.written`, -1 padded.
        selected: int64 `[T, topk]`, of `Call.selection`, -1 padded.
    """

    written: Tensor
    selected: Tensor


@dataclass(frozen=True, slots=True)
class Exchange:
    """Homes that change hands: `incoming[j]` moves from `vacated[j]` to `victims[j]`.

    The row that lived in `victims[j]` moves to `vacated[j]`.

    Attributes:
        incoming: int64 `[m]` distinct logical slots that live on the host.
        victims: the m distinct device rows they get.
        vacated: the m host rows they leave.
        fetch: bool `[m]`, false where the incoming row is about to be written anyway.
        write_back: bool `[m]`, false where the victim's row is dead.
        num: int32 `[1]` beside them, how many of the m entries count; None if all do.
    """

    incoming: Tensor
    victims: DeviceSlots
    vacated: HostSlots
    fetch: Tensor
    write_back: Tensor
    num: Tensor | None = None

    def __len__(self) -> int:
        return self.incoming.numel()


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What a call will do, decided before the map changes.

    Attributes:
        exchange: the one exchange of the call; may be empty.
        homes: of the call's rows, final once the call is complete.
    """

    exchange: Exchange
    homes: Homes


@dataclass(frozen=True, slots=True)
class CountedPlan(CallPlan):
    """A plan whose numbers the host knows.

    Attributes:
        promoted: distinct selected rows that are read from device rows.
        in_place: int64 `[r]` distinct selected logical slots that are read where they live.
    """

    promoted: int
    in_place: Tensor


@dataclass(slots=True)
class Counts:
    """Running totals of one rank; rows are distinct per domain and call.

    `selected == hits + fetched + in_place_device + in_place_host` after every call.
    """

    selected: int = 0
    hits: int = 0
    fetched: int = 0
    written_back: int = 0
    in_place_device: int = 0
    in_place_host: int = 0
    fetched_bytes: int = 0
    written_back_bytes: int = 0
    exchanges: int = 0

    def add(self, other: Counts) -> None:
        """Count what the other counted, too."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class RowStates:
    """How many rows of one domain are live and dead in each tier."""

    device_live: int
    device_dead: int
    host_live: int
    host_dead: int
