"""Bytes and weights of built-in models and of configs."""

import json

import pytest

from vllm_ula.capacity import GLM_5_3, Parallel
from vllm_ula.errors import ConfigError
from vllm_ula.plan.models import BUILT_IN, ModelConfig, load
from vllm_ula.plan.rows import tokens_of
from vllm_ula.plan.weights import weights_of


@pytest.mark.parametrize(
    ("name", "rows", "index_keys", "domains"),
    [
        ("GLM-5.3", 51_168, 2_772, 21),
        ("GLM-5.2", 51_168, 2_772, 21),
        ("GLM-5.1", 51_168, 10_296, 78),
        ("GLM-5", 51_168, 10_296, 78),
        ("DeepSeek-V3.2", 40_016, 8_052, 61),
        ("Llama-3.3-70B", 327_680, 0, 80),
        ("Qwen-2.5-72B", 327_680, 0, 80),
    ],
)
def test_bytes_of_a_token(name, rows, index_keys, domains):
    found = tokens_of(load(name.lower()), None, 0).model
    assert (found.rows, found.index_keys) == (rows, index_keys)
    assert len(found.domain_layers) == domains


def test_the_model_of_the_comparison_is_the_one_of_its_config():
    assert tokens_of(load("GLM-5.3"), "fp8_ds_mla", 0).model == GLM_5_3


def test_bfloat16_rows():
    found = tokens_of(load("GLM-5.3"), "bf16", 0).model
    assert (found.row_bytes, found.rows) == (1152, 78 * 1152)


def test_drafts_add_the_rows_and_index_keys_of_mtp_layers():
    found = tokens_of(load("GLM-5.3"), None, 2)
    assert found.mtp_layers == 1
    assert (found.model.rows, found.model.index_keys) == (79 * 656, 22 * 132)
    assert found.model.domain_layers[-1] == 1


@pytest.mark.parametrize(
    ("name", "mtp", "billions", "within"),
    [
        ("GLM-5", 0, 744, 0.001),  # "744B / 40B", vLLM recipes
        ("GLM-5", 1, 753.9, 0.0001),  # parameters of zai-org/GLM-5-FP8, which has its MTP layer
        ("GLM-5.3", 1, 753, 0.001),  # "~753B"
        ("DeepSeek-V3.2", 0, 671, 0.002),  # DeepSeek-V3's README, without indexers
        ("Llama-3.3-70B", 0, 70.6, 0.001),
        ("Qwen-2.5-72B", 0, 72.7, 0.001),
    ],
)
def test_parameters_counted_are_those_published(name, mtp, billions, within):
    assert weights_of(load(name), mtp).parameters / 1e9 == pytest.approx(billions, rel=within)


def test_bytes_counted_are_those_of_the_published_checkpoint():
    # The fp8 checkpoint of GLM-5.3 takes 704 GiB.
    assert weights_of(load("GLM-5.3"), 1).total_bytes / 2**30 == pytest.approx(704, rel=0.002)


@pytest.mark.parametrize("name", BUILT_IN)
def test_ranks_hold_all_weights_between_them(name):
    weights = weights_of(load(name), 0)
    for ranks in (1, 8):
        tp, dp = (weights.of_rank(p, ranks) for p in (Parallel.TP, Parallel.DP))
        assert weights.total_bytes <= ranks * tp <= ranks * dp
    assert weights.of_rank(Parallel.TP, 1) == weights.total_bytes


def test_a_config_of_a_checkpoint_and_a_nested_one(tmp_path):
    fields, _ = BUILT_IN["GLM-5.2"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for where in (tmp_path, tmp_path / "config.json"):
        found = load(str(where))
        assert found.name == tmp_path.name
        assert tokens_of(found, None, 0).model.rows == 51_168
    (tmp_path / "config.json").write_text(json.dumps({"text_config": fields}))
    assert tokens_of(load(str(tmp_path)), None, 0).model.index_keys == 2_772


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": None, "torch_dtype": "int7"}, "int7"),
    ],
)
def test_weights_of_unknown_size_are_not_guessed(more, said):
    config = ModelConfig("GLM", "a test", {**BUILT_IN["GLM-5"][0], **more})
    with pytest.raises(ConfigError, match=rf"not known here \({said}\); use --weights-gib"):
        weights_of(config, 0)


def test_every_built_in_model_has_a_source():
    assert all(len(source) > 20 for _, source in BUILT_IN.values())
