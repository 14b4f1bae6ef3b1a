"""The one way in which functions are compiled for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile with numba, serially: a forked child dies in parallel code its parent has run.

    What is compiled is kept beside the source, or where NUMBA_CACHE_DIR says. numba looks at the
    source of the function itself alone: what it calls and the constants it uses must be in the same
    file, or old code is run after a change.
    """
    try:
        return cast("F", njit(cache=True, nogil=True)(function))
    except RuntimeError:  # neither the folder of the source nor a home directory can be written
        return cast("F", njit(nogil=True)(function))
