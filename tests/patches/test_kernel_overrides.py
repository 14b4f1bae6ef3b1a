"""vLLM's kernel overrides after numba has been imported."""

from llvmlite.binding import ffi
from vllm.triton_utils import dispatcher

from vllm_ula.patches.cpu_kernel_overrides import PATCHES


def test_they_work_even_if_an_attempt_without_the_patch_failed():
    ffi.lib._fntab["__dict__"] = ffi.lib.LLVMPY_GetVersionInfo  # what the failed one leaves
    (patch,) = PATCHES
    patch.replace(dispatcher._rebind_kernels)([])
    assert vars(ffi.lib) == {}
