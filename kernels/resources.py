"""What a kernel costs on a GPU, from compiling it without one.

The tools are those of the Triton wheel: Triton compiles for a GPU that is not there, cuobjdump and
ptxas say what the binary uses. AMD writes that into the assembly.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from vllm_ula.kernels.variant import Variant

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# PTX: `ld.global.L1::evict_last.v4.b32`, two halves of 64 bits, the 32 bytes of sm_100, and the
# copies of pipelined loops, which go to shared memory.
PTX_LOAD = re.compile(
    r"\bld\.global[\w.:]*\.(?:v[48]\.[bfus]32|v[24]\.[bfus]64)\b"
    r"|\bcp\.async\.c[ag]\.shared\.global[\w.:]* .*, 0x10\b"
)
PTX_STORE = re.compile(r"\bst\.global[\w.:]*\.(?:v[48]\.[bfus]32|v[24]\.[bfus]64)\b")
AMD_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(?:lds_)?dwordx4\b")
AMD_STORE = re.compile(r"\b(?:global|buffer|flat)_store_dwordx4\b")


@dataclass(frozen=True)
class Resources:
    """What one variant uses on one target.

    Attributes:
        registers: of each thread; vector registers on AMD.
        shared_bytes: of each program; LDS on AMD.
        spilled_bytes: registers kept in memory, of each thread.
        wide_loads: instructions that load 16 bytes or more.
        wide_stores: instructions that store 16 bytes or more.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int
    wide_loads: int
    wide_stores: int


def resources(variant: Variant, target: str) -> Resources:
    """Compile a variant for a GPU and count what it uses.

    Args:
        variant: of an operation's `VARIANTS`.
        target: one of `TARGETS`.

    Raises:
        RuntimeError: the process interprets kernels (TRITON_INTERPRET), so they do not compile.
        ValueError: the variant does not describe every argument of its kernel.
        Exception: whatever Triton raises on a kernel that does not compile.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels compile in a process without it")
    gpu = TARGETS[target]
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(_source(variant), target=gpu, options=options)
    count: Callable[..., Resources] = _of_nvidia if gpu.backend == "cuda" else _of_amd
    # Triton reserves shared memory at launch, so the binary does not tell.
    return count(compiled.asm, gpu, compiled.metadata.shared)


def _source(variant: Variant) -> ASTSource:
    names = variant.kernel.arg_names
    described = {*variant.signature, *variant.constants}
    if described != set(names):
        raise ValueError(
            f"{variant.name}: describes {sorted(described)}, the kernel has {sorted(names)}"
        )
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        type_, _, divisor = variant.signature.get(name, "constexpr").partition(":")
        signature[name] = type_
        if divisor:
            attributes[(i,)] = [["tt.divisibility", int(divisor)]]
    return ASTSource(variant.kernel, signature, dict(variant.constants), attributes)


def _of_nvidia(assembly: dict[str, Any], gpu: GPUTarget, shared: int) -> Resources:
    with tempfile.TemporaryDirectory() as directory:
        cubin, ptx = Path(directory, "kernel.cubin"), Path(directory, "kernel.ptx")
        cubin.write_bytes(assembly["cubin"])
        ptx.write_text(assembly["ptx"])
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
        spilled = 0
        if _number(r"STACK:(\d+)", usage):  # of what uses no stack nothing is spilled
            architecture = _text(r"\.target (\w+)", assembly["ptx"])
            log = _run(
                get_ptxas(gpu.arch).path, "-v", f"--gpu-name={architecture}", ptx, "-o", "/dev/null"
            )
            spilled = _number(r"(\d+) bytes spill stores", log)
    return Resources(
        registers=_number(r"REG:(\d+)", usage),
        shared_bytes=shared,
        spilled_bytes=spilled,
        wide_loads=len(PTX_LOAD.findall(assembly["ptx"])),
        wide_stores=len(PTX_STORE.findall(assembly["ptx"])),
    )


def _of_amd(assembly: dict[str, Any], gpu: GPUTarget, shared: int) -> Resources:
    text = assembly["amdgcn"]
    return Resources(
        registers=_number(r"\.vgpr_count: +(\d+)", text),
        shared_bytes=max(shared, _number(r"\.group_segment_fixed_size: +(\d+)", text)),
        # Scalar registers spill into lanes of vector registers, which costs no memory access.
        spilled_bytes=4 * _number(r"\.vgpr_spill_count: +(\d+)", text),
        wide_loads=len(AMD_LOAD.findall(text)),
        wide_stores=len(AMD_STORE.findall(text)),
    )


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    return done.stdout + done.stderr


def _text(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"nothing in the compiler's output matches {pattern}")
    return found[1]


def _number(pattern: str, text: str) -> int:
    return int(_text(pattern, text))
