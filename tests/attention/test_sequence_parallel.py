"""Ulysses, Ring, their product and the patches' cache, for any tokens and heads, on 1 to 8 ranks, against torch's in fp64."""

from __future__ import annotations

import pytest
import torch

from parallel_backend.attention.kernels import choose_kernel
from tests.attention.over_ranks import TOLERANCE, Split, attend_over_ranks
from tests.support.selection import thorough

SPLITS = [
    # any tokens and heads
    Split(1, 2, heads=4, text=37, image=221),
    Split(2, 1, heads=4, text=37, image=221, batch=2),
    Split(2, 2, heads=4, text=1, image=64),
    Split(2, 2, heads=3, text=7, image=30, batch=2),
    Split(3, 1, heads=2, text=5, image=11),
    Split(1, 3, heads=4, text=5, image=11),
    Split(2, 4, heads=30, text=3, image=50),
    Split(4, 2, heads=3, text=2, image=3),
    Split(8, 1, heads=1, text=1, image=2),
    Split(1, 8, heads=8, text=0, image=5),
    Split(1, 7, heads=56, text=3, image=50),
    # unequal shares, whole and in patches
    *(
        Split(ring, ulysses, patches=patches, shares=shares)
        for patches in (1, 3)
        for ring, ulysses, shares in (
            (1, 2, (100, 53)),
            (2, 1, (30, 100)),
            (2, 2, (100, 70, 40, 10)),
            (1, 3, (100, 1, 1)),
            (3, 1, (100, 1, 50)),
        )
    ),
    # patches with a cache of the same call
    Split(1, 1, heads=2, text=5, image=20, patches=3),
    Split(2, 1, heads=3, text=5, image=21, patches=3),
    Split(1, 2, heads=3, text=7, image=30, patches=4),
    Split(2, 2, heads=3, text=1, image=9, patches=4),
    Split(3, 1, heads=2, text=0, image=5, patches=3),
    Split(2, 4, heads=5, text=3, image=7, patches=7),
]
GROUPED = [
    Split(ring, ulysses, heads=6, batch=2, patches=patches, shares=shares, group=6 // kv_heads)
    for patches in (1, 3)
    for ring, ulysses, kv_heads, shares in (
        *((1, ulysses, 2, ()) for ulysses in (1, 2, 3, 4)),
        *((2, ulysses, 2, ()) for ulysses in (1, 2)),
        (1, 4, 1, ()),
        (1, 2, 3, ()),
        (1, 2, 2, (100, 41)),
    )
]
"""Splits of six query heads that share heads of keys. The groups lie on one rank, or on several."""


@pytest.mark.parametrize("splits", [SPLITS, pytest.param(GROUPED, marks=thorough)], ids=["any", "shared key heads"])
def test_attention_over_ranks_equals_torchs(splits: list[Split]) -> None:
    found = attend_over_ranks(splits)
    errors = {split: split.error(each.whole) for split, each in zip(splits, found, strict=True)}
    assert {split: error for split, error in errors.items() if error > TOLERANCE} == {}
    for each in found:
        if each.patches is not None:
            torch.testing.assert_close(each.patches, each.whole, rtol=1e-5, atol=1e-6)


CHUNKED = [
    Split(1, 2, heads=8, batch=2),  # chunks of two, three and four heads
    Split(1, 4, heads=30, batch=2),
    Split(2, 2, heads=5, batch=2),
    Split(1, 2, heads=10, batch=2, shares=(100, 41)),
    Split(1, 2, heads=24, batch=2, group=6),  # each rank has two groups
    Split(1, 3, heads=24, batch=2, group=6),  # each rank has one group, or parts of two
    Split(1, 4, heads=3, batch=2),  # one rank has no head
]


def test_heads_in_chunks_give_the_same_bits() -> None:
    once, *chunked = (
        attend_over_ranks([split._replace(head_chunks=chunks) for split in CHUNKED]) for chunks in (1, 2, 3)
    )
    for split, (expected, *_), *found in zip(CHUNKED, once, *chunked, strict=True):
        assert split.error(expected) <= TOLERANCE, split
        for each in found:
            torch.testing.assert_close(each.whole, expected, rtol=1e-6, atol=1e-6)
            # The merge's vectorisation depends on the number of heads.
            assert split.ring > 1 or torch.equal(each.whole, expected), split


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 37, 300])
def test_gpu_kernels_return_attention_and_its_lse(dtype: torch.dtype, queries: int) -> None:
    q, k, v = torch.randn(3, 2, 300, 4, 128, device="cuda", dtype=dtype)
    q = q[:, :queries]
    out, lse = choose_kernel("sdpa", q.device, dtype, 128).attend(q, k, v)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 128**0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert lse.shape == scores.shape[:3]
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
