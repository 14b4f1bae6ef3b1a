"""What one token costs on a rank, and what maps and recency add to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MapBytes:
    """Bytes of map and recency; see `map_bytes.py` for those that exist.

    Attributes:
        logical: of a logical slot, in each domain.
        device: of a device slot, in each domain.
        scratch: of a logical slot, once for all domains of a rank.
    """

    logical: int = 0
    device: int = 0
    scratch: int = 0


@dataclass(frozen=True)
class TokenBytes:
    """Bytes one token costs on a rank.

    Attributes:
        rows: rows of all attention layers, k.
        index_keys: index keys of all indexer layers, i.
        map_logical: map bytes per logical slot, all domains.
        map_device: map and recency bytes per device slot, all domains.
    """

    rows: int
    index_keys: int
    map_logical: int = 0
    map_device: int = 0

    @classmethod
    def charged(cls, rows: int, index_keys: int, domains: int, maps: MapBytes) -> TokenBytes:
        """Bytes with the maps of that many domains."""
        logical = domains * maps.logical + maps.scratch
        return cls(rows, index_keys, map_logical=logical, map_device=domains * maps.device)

    @property
    def per_logical(self) -> int:
        """Device bytes every logical slot costs wherever its rows live."""
        return self.index_keys + self.map_logical

    @property
    def per_device_row(self) -> int:
        """Device bytes a device row costs beyond that."""
        return self.rows + self.map_device
