"""A DeepSeek-Sparse-Attention checkpoint small enough for any laptop.

`write_tiny_model` writes a complete Hugging Face directory of a `glm_moe_dsa` model: the
architecture of GLM-5 with 5 million parameters and a tokenizer whose tokens are bytes. Its weights
are drawn, not trained, and large enough that one wrong KV row changes the tokens. The same options
give the same files.
"""

from vllm_ula.tiny_model.checkpoint import write_tiny_model
from vllm_ula.tiny_model.options import IndexShare, TinyModelOptions

__all__ = ["IndexShare", "TinyModelOptions", "write_tiny_model"]
