"""Compiling where nothing can be kept."""

from vllm_ula.planner.jit import compiled


def test_a_source_without_a_place_for_caches_is_compiled_all_the_same():
    names = {}
    exec(compile("def double(x):\n    return 2 * x", "<nowhere>", "exec"), names)
    double = compiled(names["double"])
    assert double(21) == 42
    assert double.signatures
