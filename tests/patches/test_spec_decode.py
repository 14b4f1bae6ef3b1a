"""What the sampler of requests with drafts computes on a CPU."""

from __future__ import annotations

import torch

from vllm_ula.patches.cpu_spec_decode import PATCHES


def test_a_value_of_a_request_goes_to_each_of_its_drafts() -> None:
    """Floats stay floats; a request without drafts takes no place; 0 (greedy) becomes 1."""
    (patch,) = PATCHES
    expand = patch.replace(lambda *args: None)
    temperatures, drafts = torch.tensor([0.5, 0.0, 2.0, 0.7]), torch.tensor([2, 3, 3, 5])
    found = expand(temperatures, drafts.int(), 5, replace_from=0, replace_to=1)
    torch.testing.assert_close(found, torch.tensor([0.5, 0.5, 1.0, 0.7, 0.7]))
    assert expand(torch.tensor([3, 4]), torch.tensor([1, 2]), 2).tolist() == [3, 4]
