"""The version of vllm-ula, read as text by setup.py."""

__version__ = "0.1.0"
