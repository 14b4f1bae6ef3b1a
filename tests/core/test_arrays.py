"""Arrays on huge pages are arrays."""

import numpy as np
import pytest

from vllm_ula.arrays import HUGE_PAGE, filled


@pytest.mark.parametrize("num", [0, 1, 1000, HUGE_PAGE // 4, HUGE_PAGE + 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_filled(num, dtype):
    array = filled(num, 7, dtype)
    assert array.shape == (num,)
    assert array.dtype == dtype
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert (array == 7).all()
    if array.nbytes >= HUGE_PAGE:
        assert array.ctypes.data % HUGE_PAGE == 0


def test_memory_goes_with_the_array():
    """None of them outlives its last view."""
    import psutil

    before = psutil.Process().memory_info().rss
    for _ in range(40):
        view = filled(64 << 20, 1, np.uint8)[::2]
        del view
    assert psutil.Process().memory_info().rss - before < 256 << 20
