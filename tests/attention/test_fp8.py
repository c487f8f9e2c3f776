"""The fp8 codec of attention's exchanges: bytes and errors. Only values that are sent are rounded."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_backend.attention.codec import EXACT, FP8, Codec
from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.attention.patches import KVCache, patch_attention
from parallel_backend.attention.sequence_parallel import UspLayout, usp_attention
from parallel_backend.comm.meter import Meter
from parallel_backend.layout import SequenceSplit, cut
from parallel_backend.mesh import build_mesh
from tests.support.plans import cpu_plan
from tests.support.ranks import run_in_turn

CPU = torch.device("cpu")
TOKENS, HEADS, HEAD_DIM = 41, 6, 32


def rounded(x: Tensor) -> Tensor:
    """Round by plain arithmetic: to torch's nearest e4m3 value, after division by the least power of two with which the largest
    fits.
    """
    largest = x.double().abs().amax(-1, keepdim=True)
    scale = torch.tensor([[2.0 ** math.ceil(math.log2(one / 448))] for one in largest.flatten().tolist()])
    scale = scale.double().view(largest.shape)
    return ((x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_encoded_row_has_e4m3_values_and_their_scale(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 3, 64, generator=generator) * torch.logspace(-3, 3, 30).view(2, 5, 3, 1)
    x = x.to(dtype)
    rows = FP8.encode(x)
    assert (rows.dtype, rows.shape) == (torch.uint8, (2, 5, 3, 68))
    found = FP8.decode(rows, dtype)
    assert torch.equal(found, rounded(x))
    assert torch.equal(FP8.decode(FP8.encode(found), dtype), found)  # a second exchange changes nothing
    assert ((found - x).double().norm() / x.double().norm()).item() < 0.03


def test_nan_and_infinity_are_not_hidden_by_rounding() -> None:
    zero, bad = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, 8)
    assert torch.equal(FP8.decode(FP8.encode(zero), zero.dtype), zero)
    for value in (torch.nan, torch.inf):
        bad[..., 3] = value
        assert FP8.decode(FP8.encode(bad), bad.dtype).isnan().any()
    assert FP8.encode(zero[:, :0]).shape == (1, 0, 1, 12)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def over_ranks(inputs: Tensor, ring: int, ulysses: int, chunks: int, patches: int) -> list[tuple[Tensor, int]]:
    """Return for FP8 and EXACT the attention output over ranks, or that of patches against a filled cache, and the bytes that
    all ranks sent.
    """
    tokens, heads = inputs.shape[2:4]
    ranks = ring * ulysses
    plan = cpu_plan(ring=ring, ulysses=ulysses)
    kernel = choose_kernel("auto", CPU, inputs.dtype, HEAD_DIM).attend
    runs = [torch.arange(tokens)[run] for run in cut(tokens, patches)]

    def split(positions: Tensor) -> tuple[SequenceSplit, list[Tensor]]:
        by_rank = [positions[run] for run in cut(len(positions), ranks)]
        return SequenceSplit(tuple(map(len, by_rank)), heads, ring, ulysses, plan.shares, heads), by_rank

    def run(codec: Codec, rank: int) -> list[Tensor]:
        meter = Meter()
        mesh = build_mesh(plan, CPU, meter)
        if patches == 1:
            sequence_split, by_rank = split(runs[0])
            layout = UspLayout(mesh, sequence_split, kernel, chunks, codec)
            out = [usp_attention(*inputs[:, :, by_rank[rank]], layout)]
        else:
            ulysses_ranks = range(mesh.ring.rank * ulysses, (mesh.ring.rank + 1) * ulysses)
            ring_positions = [torch.cat([split(patch)[1][member] for member in ulysses_ranks]) for patch in runs]
            ends = torch.tensor([0, *map(len, ring_positions)]).cumsum(0).tolist()
            slots = [torch.arange(begin, end) for begin, end in pairwise(ends)]
            local_heads = split(runs[0])[0].query_slices()[mesh.ulysses.rank]
            cache = KVCache(slots)
            cache.fill(codec.decode(codec.encode(inputs[1:, :, torch.cat(ring_positions), local_heads]), inputs.dtype))
            out = []
            for patch, positions in enumerate(runs):
                sequence_split, by_rank = split(positions)
                layout = UspLayout(mesh, sequence_split, kernel, codec=codec)
                out.append(patch_attention(*inputs[:, :, by_rank[rank]], layout, patch, cache))
        return [torch.cat(out, dim=1), torch.tensor(sum(meter.sent.values()))]

    positions_by_rank = [torch.cat([split(patch)[1][rank] for patch in runs]) for rank in range(ranks)]
    found = []
    for outputs in run_in_turn([(ranks, functools.partial(run, codec)) for codec in (FP8, EXACT)]):
        result = torch.full_like(inputs[0], torch.nan)
        for positions, (local, _) in zip(positions_by_rank, outputs, strict=True):
            result[:, positions] = local
        found.append((result, sum(int(sent) for _, sent in outputs)))
    return found


@pytest.mark.parametrize(
    ("ring", "ulysses", "chunks", "patches"), [(1, 2, 1, 1), (1, 2, 3, 1), (2, 1, 1, 1), (2, 2, 1, 1), (2, 2, 1, 2)]
)
def test_attention_rounds_only_values_that_are_sent(ring: int, ulysses: int, chunks: int, patches: int) -> None:
    """Compare with attention of rounded operands whose result is rounded. Few values differ, by one rounding."""
    inputs = torch.randn(3, 2, TOKENS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(3))
    (found, sent), (_, in_fp32) = over_ranks(inputs, ring, ulysses, chunks, patches)
    q, k, v = map(rounded, inputs)
    expected = attended(q if ulysses > 1 else inputs[0], k, v).float()
    if ulysses > 1:
        expected = rounded(expected)
    if patches == 1:
        assert ((found - expected).norm() / expected.norm()).item() < 1e-3
    exact = attended(*inputs)
    assert 1e-3 < ((found - exact).norm() / exact.norm()).item() < 0.06
    lse = 0 if patches == 1 else 4 * inputs[0, ..., 0].numel() * (ring - 1)
    assert sent - lse == (in_fp32 - lse) * (HEAD_DIM + 4) / (4 * HEAD_DIM)
