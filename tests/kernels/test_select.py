"""What the indexer selects for a call, through all of its operations."""

from types import SimpleNamespace

import pytest
import torch

from vllm_ula.attention import indexer
from vllm_ula.attention.metadata import UlaMetadata
from vllm_ula.kernels import dispatch
from vllm_ula.kernels.dispatch import Kernels
from vllm_ula.kernels.reference.fp8 import quantize
from vllm_ula.kernels.reference.index_keys import store_index_keys

K, BLOCK_SIZE, HEADS, PADDING = 24, 16, 4, 2


class Call:
    """The last tokens of some requests, padding, and one token more of which nothing is known.

    Args:
        lengths: of the requests, these tokens included.
        tokens: of each request in the call.
    """

    def __init__(self, lengths, tokens):
        generator = torch.Generator().manual_seed(sum(lengths))

        def draw(*shape):
            return torch.randn(shape, generator=generator)

        own = zip(lengths, tokens, strict=True)
        position = [p for n, num in own for p in range(n - num, n)] + [-1] * PADDING
        request = [r for r, num in enumerate(tokens) for _ in range(num)] + [-1] * PADDING
        self.num = len(position)
        self.metadata = UlaMetadata(
            num_actual_tokens=self.num,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            block_table=torch.arange(len(lengths) * 8, dtype=torch.int32).flip(0).view(-1, 8),
            request_of_token=torch.tensor(request),
            position_of_token=torch.tensor(position),
            decode=torch.zeros(self.num, dtype=torch.bool),
            has_prefill=True,
            max_length=max(lengths),
            block_size=BLOCK_SIZE,
            num_decodes=len(lengths),
            num_decode_tokens=self.num,
        )
        written = self.metadata.selection(self.metadata.position_of_token.unsqueeze(1))
        self.metadata.slot_mapping = written.squeeze(1)
        self.queries = quantize(draw(self.num + 1, HEADS, 128))[0]
        self.keys, self.weights = draw(self.num + 1, 128), draw(self.num + 1, HEADS)
        self.cache = torch.zeros(len(lengths) * 8 * BLOCK_SIZE, 132, dtype=torch.uint8)
        store_index_keys(self.cache, torch.arange(len(self.cache)), draw(len(self.cache), 128))

    def select(self, monkeypatch, kernels=Kernels.AUTO):
        """What is selected, and the cache afterwards."""
        cache = self.cache.clone()
        layer = SimpleNamespace(kv_cache=cache.view(-1, BLOCK_SIZE, 132))
        context = SimpleNamespace(
            attn_metadata={"keys": self.metadata}, no_compile_layers={"keys": layer}
        )
        monkeypatch.setattr(indexer, "get_forward_context", lambda: context)
        monkeypatch.setattr(dispatch, "_used", kernels)
        selection = torch.full((self.num + 2, K), 77, dtype=torch.int32)
        indexer.select(self.queries, self.keys, self.weights, selection, "keys")
        assert (selection[self.num - PADDING : self.num + 1] == -1).all()
        assert (selection[self.num + 1] == 77).all()
        return selection[: self.num - PADDING], cache


CALLS = [Call([90, 5, 33], [3, 2, 1]), Call([100], [7]), Call([24, 20], [5, 1])]


@pytest.mark.parametrize("call", CALLS)
def test_triton_selects_what_torch_selects(call, monkeypatch):
    expected, stored = call.select(monkeypatch, Kernels.TORCH)
    found, stored_too = call.select(monkeypatch, Kernels.TRITON)
    assert torch.equal(found, expected)
    assert torch.equal(stored_too, stored)


@pytest.mark.parametrize("call", CALLS)
def test_a_token_selects_all_it_may_read_or_the_best_of_it(call, monkeypatch):
    found, _ = call.select(monkeypatch)
    for token, position in enumerate(call.metadata.position_of_token[:-PADDING].tolist()):
        selected = found[token][found[token] >= 0]
        assert len(selected) == min(position + 1, K)
        assert torch.equal(selected, selected.unique())
        assert selected.max() <= position


def test_keys_of_the_call_count(monkeypatch):
    """A token's own key, if it scores best, is selected."""
    call = Call([100], [1])
    call.keys[0] = 100 * call.queries[0].float().mean(0)
    call.weights = torch.ones_like(call.weights)
    found, stored = call.select(monkeypatch)
    assert 99 in found[0]
    changed = (stored != call.cache).any(1).nonzero().flatten()
    assert changed.tolist() == call.metadata.slot_mapping[:1].tolist()


def test_chunks_select_what_the_whole_call_selects(monkeypatch):
    call = Call([90, 30, 50], [4, 3, 2])
    whole, _ = call.select(monkeypatch)
    monkeypatch.setattr(indexer, "WORKSPACE_BYTES", 2 * 90 * 4)
    calls = dispatch.calls["index_scores", Kernels.TORCH]
    parts, _ = call.select(monkeypatch)
    assert dispatch.calls["index_scores", Kernels.TORCH] - calls == 6  # of 11 tokens with padding
    assert torch.equal(parts, whole)


def test_nothing_is_scored_while_everything_is_selected(monkeypatch):
    call = Call([24, 20], [5, 1])
    calls = dispatch.calls["index_scores", Kernels.TORCH]
    found, _ = call.select(monkeypatch)
    assert dispatch.calls["index_scores", Kernels.TORCH] == calls
    expected = [[p if p <= last else -1 for p in range(K)] for last in (19, 20, 21, 22, 23, 19)]
    assert found.tolist() == expected


def test_a_profiling_run_selects_nothing(monkeypatch):
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(indexer, "get_forward_context", lambda: context)
    selection = torch.zeros(3, K, dtype=torch.int32)
    indexer.select(torch.empty(2, HEADS, 128), torch.empty(2, 128), None, selection, "keys")
    assert selection[:, 0].tolist() == [-1, -1, 0]
