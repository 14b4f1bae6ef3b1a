"""Planning a call: what is a hit, who gets a device row, and which rows give way."""

from vllm_ula.planning.base import Planning, Scratch

__all__ = ["Planning", "Scratch"]
