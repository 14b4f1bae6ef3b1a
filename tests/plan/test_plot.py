"""The picture: what it says, and that it is written for every kind of model and budget."""

import pytest

from vllm_ula.errors import UlaError
from vllm_ula.plan.options import Options
from vllm_ula.plan.planned import plan
from vllm_ula.plan.plot import draw

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    "options",
    [
        Options("GLM-5.3", gpu="b300", host_gib_per_gpu=178.8, tp=True),
        Options("DeepSeek-V3.2", kv_gib_per_gpu=0.1, host_gib_per_gpu=1),
        Options("Llama-3.3-70B", dp=True),
        Options("GLM-5", context="3000000", kv_gib_per_gpu=20),
    ],
)
def test_it_is_written(tmp_path, options):
    draw(tmp_path / "new" / "plan.png", plan(options))
    picture = (tmp_path / "new" / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert 20_000 < len(picture) < 300_000


def test_it_says_limits_assumptions_and_what_is_not_served(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    found = plan(Options("GLM-5.3", gpu="b300", host_gib_per_gpu=178.8, tp=True))
    draw(tmp_path / "plan.png", found)
    (figure,) = drawn
    left, right = figure.axes
    assert left.get_yscale() == left.get_xscale() == "log"
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels[0] == "device only\n   device memory"
    assert "from 131,072 tokens: host memory" in labels[2]
    assert labels[3].startswith("UlaCache, not served by this version")
    kinds = [text.get_text() for text in right.get_legend().get_texts()]
    assert kinds[:3] == ["unique rows", "replicas", "index keys"]
    note = " ".join(figure._supxlabel.get_text().split())
    assert all(f"{taken.name} {taken.value}" in note for taken in found.assumptions)
    assert "nothing measured: capacity, not speed" in note


@pytest.mark.parametrize("name", ["plan.xyz", "plan", "."])
def test_a_name_that_is_no_picture_is_refused(tmp_path, name):
    with pytest.raises(UlaError, match=r"--plot=.*: must name a \.png; use plan\.png"):
        Options("GLM-5.3", plot=tmp_path / name)
