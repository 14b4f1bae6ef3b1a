"""GiB, and whole blocks."""

from __future__ import annotations

GIB = 2**30


def floor_to(value: int, multiple: int) -> int:
    """Largest multiple not above `value`."""
    return value // multiple * multiple


def ceil_to(value: int, multiple: int) -> int:
    """Smallest multiple not below `value`."""
    return -(-value // multiple) * multiple
