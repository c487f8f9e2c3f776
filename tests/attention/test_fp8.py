"""The fp8 codec of attention's exchanges: bytes and errors. Only values that are sent are rounded."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel_backend.attention.codec import EXACT, FP8
from tests.attention.over_ranks import Split, attend_over_ranks, torch_attention
from tests.support.latents import relative_error

HEAD_DIM = 32


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
    assert relative_error(found.double(), x.double()) < 0.03


def test_nan_and_infinity_are_not_hidden_by_rounding() -> None:
    zero, bad = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, 8)
    assert torch.equal(FP8.decode(FP8.encode(zero), zero.dtype), zero)
    for value in (torch.nan, torch.inf):
        bad[..., 3] = value
        assert FP8.decode(FP8.encode(bad), bad.dtype).isnan().any()
    assert FP8.encode(zero[:, :0]).shape == (1, 0, 1, 12)


@pytest.mark.parametrize(
    ("ring", "ulysses", "chunks", "patches"), [(1, 2, 1, 1), (1, 2, 3, 1), (2, 1, 1, 1), (2, 2, 1, 1), (2, 2, 1, 2)]
)
def test_attention_rounds_only_values_that_are_sent(ring: int, ulysses: int, chunks: int, patches: int) -> None:
    """Compare with attention of rounded operands whose result is rounded. Few values differ, by one rounding."""
    split = Split(
        ring, ulysses, 6, text=0, image=41, batch=2, patches=patches, head_chunks=chunks, head_dim=HEAD_DIM, codec=FP8
    )
    found, in_fp32 = attend_over_ranks([split, split._replace(codec=EXACT)])
    q, k, v = map(rounded, split.inputs)
    expected = torch_attention([q if ulysses > 1 else split.inputs[0], k, v]).float()
    if ulysses > 1:
        expected = rounded(expected)
    assert relative_error(found.whole, expected) < 1e-3
    for out in (found.whole, *([] if found.patches is None else [found.patches])):
        assert 1e-3 < relative_error(out, torch_attention(split.inputs)) < 0.06
    lse = 0 if patches == 1 else 4 * split.inputs[0, ..., 0].numel() * (ring - 1)
    assert found.sent - lse == (in_fp32.sent - lse) * (HEAD_DIM + 4) / (4 * HEAD_DIM)
