"""Pools of rows for the tests of what touches rows."""

import mmap

import torch

from vllm_ula.kernels.reference import fp8_rows

DTYPES = {
    "fp8": torch.uint8,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
WIDTH = fp8_rows.WIDTH
MAP_NORESERVE = 0x4000  # Linux; `mmap` does not name it before Python 3.13


def make(kind, num_device, num_host, width=WIDTH):
    """Device and host rows of normal numbers."""
    generator = torch.Generator().manual_seed(num_device)
    rows = torch.randn(num_device + num_host, width, generator=generator)
    rows = fp8_rows.pack(rows) if kind == "fp8" else rows.to(DTYPES[kind])
    return rows[:num_device].clone(), rows[num_device:].clone()


def poison(device, host, homes):
    """Make every byte 255 in the rows that `homes` does not name: NaN in each dtype."""
    unused = torch.ones(len(device) + len(host), dtype=torch.bool)
    unused[homes[homes >= 0]] = False
    device.view(torch.uint8)[unused[: len(device)]] = 255
    host.view(torch.uint8)[unused[len(device) :]] = 255


def homes(*shape, num, nothing=0.2, seed=0):
    """Random homes in `[0, num)`, with duplicates, and -1 for one in five."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, num, shape, generator=generator)
    return found.masked_fill_(torch.rand(shape, generator=generator) < nothing, -1)


def huge(kind, num_rows, width):
    """Rows of address space: only what is written takes memory."""
    itemsize = DTYPES[kind].itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    mapping = mmap.mmap(-1, num_rows * width * itemsize, flags=flags)
    return torch.frombuffer(mapping, dtype=DTYPES[kind]).view(num_rows, width)
