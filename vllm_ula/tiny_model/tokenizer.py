"""A tokenizer whose tokens are bytes, for models that have no text to learn one from."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NUM_BYTES = 256
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>")
EOS = NUM_BYTES

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_byte_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which `AutoTokenizer` loads offline.

    Token ids 0 to 255 are the byte values, then come the special tokens, then `<|260|>` and so on,
    so that every id the model can produce decodes. No token is added to a prompt.

    Args:
        directory: Exists.
        vocab_size: Tokens in all.
        max_length: `model_max_length`, tokens.
    """
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    unnamed = range(NUM_BYTES + len(SPECIAL_TOKENS), vocab_size)
    tokenizer.add_tokens([AddedToken(f"<|{i}|>", normalized=False) for i in unnamed])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _byte_vocabulary() -> dict[str, int]:
    """The character by which a byte-level tokenizer writes each byte, to the byte's value.

    Printable Latin-1 stands for itself; the rest takes the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {
        chr(byte if byte in printable else NUM_BYTES + others.index(byte)): byte
        for byte in range(NUM_BYTES)
    }
