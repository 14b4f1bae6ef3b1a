"""The tiny checkpoint: same options same files, loads everywhere, refuses what cannot work."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import brute_force, hf_reference
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from vllm_ula.cli import main
from vllm_ula.errors import ConfigError
from vllm_ula.tiny_model import IndexShare, TinyModelOptions, write_tiny_model

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def written(directory: Path, **options: Any) -> Path:
    write_tiny_model(directory, TinyModelOptions(**options))
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers": 3, "mtp": 1, "index_share": IndexShare(2, 1), "seed": 7}
    first, second = written(tmp_path / "a", **options), written(tmp_path / "b", **options)
    assert {path.name for path in first.iterdir()} == FILES
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    first = weights(written(tmp_path / "a", layers=2, seed=1))
    second = weights(written(tmp_path / "b", layers=2, seed=2))
    assert first.keys() == second.keys()
    drawn = {name for name in first if not torch.all(first[name] == 1)}
    assert all(not torch.equal(first[name], second[name]) for name in drawn)


def test_options_add_or_take_weights_and_change_none(tmp_path: Path) -> None:
    plain = weights(written(tmp_path / "plain"))
    others = {
        "longer": weights(written(tmp_path / "longer", layers=6)),
        "mtp": weights(written(tmp_path / "mtp", mtp=2)),
        "shared": weights(written(tmp_path / "shared", index_share=IndexShare(4, 1))),
    }
    for other in others.values():
        assert all(torch.equal(plain[name], other[name]) for name in plain.keys() & other.keys())
    assert plain.keys() <= others["longer"].keys()
    assert {name.split(".")[2] for name in others["mtp"].keys() - plain.keys()} == {"4", "5"}
    missing = plain.keys() - others["shared"].keys()
    assert {name.split(".")[2] for name in missing} == {"1", "2", "3"}
    assert all(".indexer." in name for name in missing)


def test_every_drawn_matrix_is_large_enough_to_matter(tmp_path: Path) -> None:
    for name, weight in weights(written(tmp_path / "m", mtp=1)).items():
        if weight.dim() == 2:
            assert weight.std() >= 0.097, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_the_same_weights_rounded(tmp_path: Path, dtype: str) -> None:
    wanted = getattr(torch, dtype)
    full = weights(written(tmp_path / "full", layers=2))
    rounded = weights(written(tmp_path / "rounded", layers=2, dtype=dtype))
    for name, weight in rounded.items():
        kept = name.endswith("e_score_correction_bias")
        assert weight.dtype == (torch.float32 if kept else wanted), name
        assert torch.equal(weight, full[name].to(weight.dtype)), name
    assert AutoConfig.from_pretrained(tmp_path / "rounded").dtype == wanted


@pytest.mark.parametrize(
    ("share", "indexers"),
    [
        (None, [0, 1, 2, 3]),
        (IndexShare(4, 1), [0]),
        (IndexShare(4, 3), [0, 1, 2]),
        (IndexShare(2, 1), [0, 2]),
        (IndexShare(3, 2), [0, 1]),
    ],
)
def test_index_share_is_what_transformers_reads(
    tmp_path: Path, share: IndexShare | None, indexers: list[int]
) -> None:
    directory = written(tmp_path / "m", index_share=share, mtp=1)
    config = AutoConfig.from_pretrained(directory)
    assert [i for i, kind in enumerate(config.indexer_types) if kind == "full"] == indexers
    names = [name for name in weights(directory) if name.endswith("indexer.wk.weight")]
    assert names == [f"model.layers.{i}.self_attn.indexer.wk.weight" for i in [*indexers, 4]]


@pytest.mark.parametrize("options", [{}, {"index_share": IndexShare(4, 1)}, {"layers": 1}])
def test_transformers_loads_every_name(tmp_path: Path, options: dict[str, Any]) -> None:
    info = hf_reference.loading_info(written(tmp_path / "m", **options))
    assert info.keys() >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
    assert not any(info.values())


def test_transformers_leaves_out_mtp_layers_only(tmp_path: Path) -> None:
    info = hf_reference.loading_info(written(tmp_path / "m", mtp=2))
    unexpected = info.pop("unexpected_keys")
    assert {".".join(name.split(".")[:3]) for name in unexpected} == {
        "model.layers.4",
        "model.layers.5",
    }
    assert not any(info.values())


def test_mtp_layers_share_embedding_and_head(tmp_path: Path) -> None:
    found = weights(written(tmp_path / "m", mtp=1))
    embedding = found["model.embed_tokens.weight"]
    assert torch.equal(found["model.layers.4.embed_tokens.weight"], embedding)
    assert torch.equal(found["model.layers.4.shared_head.head.weight"], found["lm_head.weight"])
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1


def test_tokenizer_is_one_token_a_byte(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        written(tmp_path / "m", layers=1), local_files_only=True
    )
    text = "PB-LRU: 128 Zeilen, Größe 656 B → ok\n\t" + "".join(map(chr, range(256))) + "日本"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    config = AutoConfig.from_pretrained(tmp_path / "m")
    assert len(tokenizer) == config.vocab_size
    assert all(tokenizer.decode([i]) for i in range(config.vocab_size))
    assert tokenizer.eos_token_id == config.eos_token_id == 256
    assert tokenizer.model_max_length == config.max_position_embeddings


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        written(tmp_path / "m", layers=1), local_files_only=True
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == [257, *b"Be brief.", 258, *b"Hi", 259]


def test_completions_vary_and_are_ascii(checkpoint: Path, tokens: list[int]) -> None:
    model = brute_force.Model(checkpoint)
    history = tokens[:60]
    for _ in range(24):
        history.append(int(model.forward(history).logits[-1].argmax()))
    completion = history[60:]
    assert len(set(completion)) >= 10
    assert all(0x20 <= token < 0x7F for token in completion)


def test_no_selection_hangs_on_a_tie(
    checkpoint: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    top_positions = brute_force.top_positions

    def record(scores: torch.Tensor, topk: int) -> torch.Tensor:
        seen.append(scores)
        return top_positions(scores, topk)

    monkeypatch.setattr(brute_force, "top_positions", record)
    brute_force.Model(checkpoint).forward(tokens)
    assert seen
    for scores in seen:
        ordered = scores[128:].sort(-1, descending=True).values
        assert (ordered[:, 127] > ordered[:, 128]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers=0: at least 1; use 4"),
        ({"topk": 0}, "topk=0: at least 1; use 128"),
        ({"mtp": -1}, "mtp=-1: 0 or more; use 1"),
        ({"seed": -1}, "seed=-1: from 0 to 2**63 - 1; use 0"),
        (
            {"max_positions": 64},
            "max_positions=64: at least topk, which is 128; use 16384",
        ),
        ({"dtype": "int8"}, "dtype=int8: one of float32, bfloat16, float16; use float32"),
        ({"index_share": IndexShare(0, 1)}, "index_share=0:1: FREQ is at least 1; use 4:1"),
        (
            {"index_share": IndexShare(4, 0)},
            "index_share=4:0: OFFSET is at least 1, because the first layer has no selection "
            "to reuse; use 4:1",
        ),
        (
            {"index_share": IndexShare(4, 4)},
            "index_share=4:4: at least one of 4 layers reuses a selection; use 4:1",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TinyModelOptions(**options)
    assert str(refused.value) == message


def test_what_a_refusal_proposes_works() -> None:
    TinyModelOptions(index_share=IndexShare(4, 1))
    TinyModelOptions(layers=2, index_share=IndexShare(2, 1))


def test_command_writes_what_the_function_writes(tmp_path: Path) -> None:
    arguments = "--layers 3 --topk 64 --index-share 2:1 --mtp 1 --seed 5 --max-positions 512"
    options = TinyModelOptions(3, 64, IndexShare(2, 1), 1, 5, 512, "bfloat16")
    assert main(["tiny-model", str(tmp_path / "a"), *arguments.split(), "--dtype=bfloat16"]) == 0
    write_tiny_model(tmp_path / "b", options)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layers many", "layers=many: a whole number; use 4"),
        ("--layers 0", "layers=0: at least 1; use 4"),
        ("--index-share 4", "index_share=4: two whole numbers with a colon between; use 4:1"),
        ("--colour red", "unrecognized arguments: --colour red"),
    ],
)
def test_command_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(["tiny-model", str(tmp_path / "m"), *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-ula: {message}")
    assert not (tmp_path / "m").exists()


def test_an_earlier_tiny_model_is_overwritten(tmp_path: Path) -> None:
    written(tmp_path / "m", layers=1, seed=1)
    written(tmp_path / "m", layers=1)
    fresh = written(tmp_path / "fresh", layers=1)
    for name in FILES:
        assert (tmp_path / "m" / name).read_bytes() == (fresh / name).read_bytes(), name


@pytest.mark.parametrize("config", ['{"model_type": "glm_moe_dsa"}', "{", None])
def test_somebody_elses_directory_is_left_alone(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "weights.bin").write_bytes(b"precious")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="new or empty directory"):
        write_tiny_model(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_imports_nothing_heavy() -> None:
    program = "import sys, vllm_ula.cli; assert not {'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
