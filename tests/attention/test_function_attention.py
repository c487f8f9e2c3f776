"""A function in place of a kernel receives all tokens of some heads in the model's order, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel_backend.attention.function_attention import FunctionAttention
from parallel_backend.comm.meter import Meter
from parallel_backend.layout import SequenceSplit
from parallel_backend.mesh import build_mesh
from parallel_backend.models.sequence_parallel.placement import Placement, by_shares, order_of
from tests.support.attention_functions import windowed
from tests.support.plans import cpu_plan
from tests.support.ranks import OnRank, run_in_turn

CPU = torch.device("cpu")
TEXT, PICTURE, WIDTH = 7, 30, 8


CASES = [(30, 30, 4, 1), (30, 30, 4, 3), (12, 4, 2, 2), (12, 3, 4, 2), (3, 3, 4, 1)]
"""Heads, heads of keys, ranks and chunks."""


@pytest.mark.parametrize("replicated_keys", [False, True], ids=["keys spread", "keys on every rank"])
def test_uneven_tokens_and_heads_give_the_functions_own_result(replicated_keys: bool) -> None:
    """The picture has patches in rows, of which each rank has parts. Each head has a window of its own."""
    made = [over_ranks(*case, replicated_keys) for case in CASES]
    results = run_in_turn([(ranks, on_rank) for (_, _, ranks, _), (on_rank, _, _) in zip(CASES, made, strict=True)])
    for case, outs, (_, expected, positions) in zip(CASES, results, made, strict=True):
        result = torch.full_like(expected, torch.nan)
        for own, out in zip(positions, outs, strict=True):
            result[:, own] = out
        assert torch.allclose(result, expected, atol=1e-6), case


def over_ranks(
    heads: int, kv_heads: int, ranks: int, chunks: int, replicated_keys: bool
) -> tuple[OnRank, Tensor, list[Tensor]]:
    """Return the function of each rank, the expected result, and the positions of each rank's tokens."""
    generator = torch.Generator().manual_seed(heads * ranks)
    keys = 11 if replicated_keys else TEXT + PICTURE
    q = torch.randn(2, TEXT + PICTURE, heads, WIDTH, generator=generator)
    k, v = torch.randn(2, 2, keys, kv_heads, WIDTH, generator=generator)
    of_heads = windowed([1 + head % 5 for head in range(heads)])
    rows = [torch.arange(start, PICTURE, 4) for start in range(4)]
    plan = cpu_plan(ulysses=ranks)
    streams = [by_shares(plan.shares, TEXT, [torch.arange(TEXT)]), by_shares(plan.shares, PICTURE, rows)]

    def function(run: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        options = {"skip_reshape": True, "skip_output_reshape": True}
        return of_heads(run, heads)(None, q, k, v, q.shape[1], **options).transpose(1, 2)

    def on_rank(rank: int) -> Tensor:
        mesh = build_mesh(plan, CPU, Meter())
        counts = tuple(indices(streams, other).numel() for other in range(ranks))
        split = SequenceSplit(counts, heads, 1, ranks, plan.shares, kv_heads)
        attention = FunctionAttention(mesh.ulysses, split, order_of(streams), replicated_keys, chunks)
        local = indices(streams, rank)
        return attention(function, q[:, local], *((k, v) if replicated_keys else (k[:, local], v[:, local])))

    expected = function(slice(0, heads), q, *(x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v)))
    return on_rank, expected, [indices(streams, rank) for rank in range(ranks)]


def indices(streams: list[Placement], rank: int) -> Tensor:
    """Return the positions of a rank's tokens, stream after stream."""
    first, second = streams
    return torch.cat([first.ranks[rank], second.ranks[rank] + first.length])
