"""`--json`, field by field: a change here is a new schema."""

import pytest
from plan.rig import planned, text

from vllm_ula.plan import schema

SLOTS = ("logical_slots", "device_slots", "host_slots", "physical_slots")
CELL = {
    "status": str,
    **dict.fromkeys(SLOTS, int),
    "unique_share": float,
    "limit": str,
    "admitted": {"69632": int, "88501": int, "110592": int},
    "raised_by": [str],
    "bytes": {"unique": int, "replicas": int, "index_keys": int, "buffers": int},
}
BUSES = ("hbm", "nvlink", "pcie")
SCHEMA = {
    "schema": int,
    "model": {
        "name": str,
        "source": str,
        "layers": int,
        "indexer_layers": int,
        "domains": int,
        "topk": int,
        "row_type": str,
    },
    "machine": {"gpu": str, "gpus": int, "source": str},
    "parallel": str,
    "lengths": {"shortest": int, "mean": int, "longest": int},
    "bytes_per_token": {"rows": int, "index_keys": int},
    "per_rank": {
        "device_bytes": int,
        "host_bytes": int,
        "device_bytes_by": {"dp": int, "tp": int},
    },
    "engine": {
        **dict.fromkeys(("logical_slots", "device_slots", "host_slots", "usable_slots"), int),
        **dict.fromkeys(("block_size", "min_device_slots", "index_key_bytes", "map_bytes"), int),
        "host_pool_bytes": int,
        "limit": str,
        "refused": type(None),
    },
    "systems": {
        system: {"dp": CELL, "tp": CELL}
        for system in ("device_only", "sglang_hisparse", "vllm_hisparse", "ulacache")
    },
    "decode_step": {"requests": int, "wanted_rows": int, "device_rows": int, "fits": bool},
    "roofline": {
        "hit_rate": float,
        "cards": [
            {
                "gpu": str,
                "bytes": dict.fromkeys(BUSES, int),
                "microseconds": dict.fromkeys(BUSES, float),
                "bound": str,
            }
        ],
    },
    "assumptions": [{"name": str, "value": str, "why": str}],
}
RUN = ("GLM-5.3", "--gpu", "b300", "--host-gib-per-gpu", 178.8, "--context", "66k..106k")


def differences(value, wanted, where="$"):
    """Where a value is not of a shape."""
    if isinstance(wanted, dict):
        if not isinstance(value, dict) or set(value) != set(wanted):
            return [f"{where}: {value}"]
        return [d for key in wanted for d in differences(value[key], wanted[key], f"{where}.{key}")]
    if isinstance(wanted, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: {value}"]
        return [d for i, v in enumerate(value) for d in differences(v, wanted[0], f"{where}[{i}]")]
    return [] if type(value) is wanted else [f"{where}: {value}"]


def test_every_field(capsys):
    assert differences(planned(capsys, *RUN), SCHEMA) == []


def test_control_a_field_more_or_of_another_type_is_found(capsys):
    found = planned(capsys, *RUN)
    found["per_rank"]["more"] = 1
    found["systems"]["ulacache"]["dp"]["unique_share"] = 1
    assert len(differences(found, SCHEMA)) == 2


def test_every_field_is_documented(capsys):
    def names(shape):
        if isinstance(shape, list):
            yield from names(shape[0])
        elif isinstance(shape, dict):
            for key, value in shape.items():
                if not key.isdigit():
                    yield key
                    yield from names(value)

    assert [name for name in names(SCHEMA) if name not in schema.__doc__] == []


def test_what_the_fields_say_about_each_other(capsys):
    found = planned(capsys, *RUN, "--tp")
    assert found["schema"] == 1
    assert found["parallel"] == "tp"
    ranks = found["machine"]["gpus"]
    per_rank, engine = found["per_rank"], found["engine"]
    assert per_rank["device_bytes"] == per_rank["device_bytes_by"]["tp"]
    ours = found["systems"]["ulacache"]["dp"]
    for name in ("logical_slots", "device_slots", "host_slots"):
        assert ours[name] == ranks * engine[name]  # totals over ranks
    assert ours["physical_slots"] == ours["logical_slots"]
    for layouts in found["systems"].values():
        for cell in layouts.values():
            assert cell["physical_slots"] == cell["device_slots"] + cell["host_slots"]
            share = cell["logical_slots"] / cell["physical_slots"]
            assert cell["unique_share"] == pytest.approx(share)
            assert cell["bytes"]["unique"] == cell["logical_slots"] * 51_168
        assert all(count % ranks == 0 for count in layouts["dp"]["admitted"].values())
    assert found["systems"]["ulacache"]["tp"]["status"] == "not served by this version"


def test_a_dense_model_has_figures_of_the_device_alone(capsys):
    found = planned(capsys, "Qwen-2.5-72B", "--tp")
    assert found["engine"] is found["decode_step"] is None
    for name, layouts in found["systems"].items():
        for cell in layouts.values():
            assert (cell["logical_slots"] is None) == (
                name != "device_only" or cell["limit"] == "device memory: there is none for KV"
            )
            assert cell["status"].startswith("does not apply") == (name != "device_only")
    dp = found["systems"]["device_only"]["dp"]
    assert dp["limit"].endswith("there is none for KV")
    assert dp["raised_by"] == ["GPUs whose memory the weights do not fill"]
    assert min(found["systems"]["device_only"]["tp"]["admitted"].values()) > 0


def test_assumptions_list_every_default_and_nothing_that_was_given(capsys):
    defaults = {taken["name"] for taken in planned(capsys, "GLM-5.3")["assumptions"]}
    assert defaults == {
        *("spec_tokens", "kv_dtype", "gpu", "gpus", "host_gib_per_gpu", "memory_fraction"),
        *("activation_gib", "weights_gib", "card's memory", "output", "context"),
        *("lengths between", "length of a request", "hot_rows", "parallel", "max_num_seqs"),
        *("block_size", "planner", "hit_rate"),
    }
    options = {
        "--spec-tokens": 2,
        "--kv-dtype": "bf16",
        "--gpu": "b300",
        "--gpus": 8,
        "--kv-gib-per-gpu": 100,
        "--host-gib-per-gpu": 10,
        "--output": 5,
        "--context": 9000,
        "--hot-rows": 99,
        "--max-num-seqs": 64,
        "--block-size": 128,
        "--hit-rate": 0.9,
    }
    given = [word for option in options.items() for word in option]
    left = {taken["name"] for taken in planned(capsys, "GLM-5.3", "--dp", *given)["assumptions"]}
    assert left == {"planner"}


@pytest.mark.parametrize("layout", ["--dp", "--tp"])
@pytest.mark.parametrize("model", ["GLM-5.3", "DeepSeek-V3.2", "Llama-3.3-70B"])
def test_the_text_has_every_assumption_and_calls_nothing_a_speed_up(capsys, model, layout):
    out = text(capsys, model, layout)
    words = " ".join(out.split())
    for taken in planned(capsys, model, layout)["assumptions"]:
        assert f"{taken['name']} {taken['value']}: {taken['why']}" in words
    assert max(map(len, out.splitlines())) <= 140
    for word in ("speedup", "speed-up", "faster", "throughput"):
        assert word not in words.lower()
    assert "Nothing here says how fast they run." in words


def test_the_text_says_what_is_not_served(capsys):
    out = text(capsys, *RUN, "--tp")
    (ours,) = (line for line in out.splitlines() if line.endswith(" *"))
    assert ours.startswith("  UlaCache ")
    assert "  * not served by this version: " in out
    assert "is not served by this version." in text(capsys, "Llama-3.3-70B", "--tp")


def test_the_roofline_has_the_project_s_figures(capsys):
    (_, h200, b300) = planned(capsys, *RUN, "--hit-rate", 0.866)["roofline"]["cards"]
    # 13.4 % of 2,048 rows of 51,168 bytes: 14 MB a request and step, each way.
    assert h200["bytes"]["pcie"] == round(0.134 * 2048 * 51_168)
    assert h200["microseconds"]["pcie"] == pytest.approx(14.04e6 / 64e3, rel=1e-3)
    assert b300["microseconds"]["pcie"] == pytest.approx(14.04e6 / 128e3, rel=1e-3)
    assert h200["bytes"]["nvlink"] == 0
    (_, h200, _) = planned(capsys, *RUN, "--tp")["roofline"]["cards"]
    assert h200["bytes"]["nvlink"] == round(7 / 8 * 2048 * 51_168)  # 91.7 MB
