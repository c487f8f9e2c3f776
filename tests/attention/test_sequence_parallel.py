"""Ulysses, Ring, their product and the patches' cache, for any tokens and heads, on 1 to 8 ranks, against torch's in fp64."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.attention.online_softmax import OnlineSoftmax
from parallel_backend.attention.patches import KVCache, patch_attention
from parallel_backend.attention.sequence_parallel import UspLayout, usp_attention
from parallel_backend.comm.meter import Meter
from parallel_backend.errors import Refused
from parallel_backend.layout import SequenceSplit, cut
from parallel_backend.mesh import build_mesh
from parallel_backend.models.sequence_parallel.placement import Placement, by_shares, slots_of
from tests.support.plans import cpu_plan
from tests.support.ranks import OnRank, run_in_turn
from tests.support.selection import thorough

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""The largest absolute difference from torch's attention in fp64."""


def qkv(tokens: int, heads: int, batch: int = 1, head_dim: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(tokens * heads)
    return torch.randn(3, batch, tokens, heads, head_dim, generator=generator)


def torch_attention(inputs: Tensor, group: int = 1) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in inputs.double())
    return F.scaled_dot_product_attention(q, k[:, ::group], v[:, ::group], enable_gqa=True).transpose(1, 2)


class Split(NamedTuple):
    """An attention over ranks.

    With several patches, each patch is also computed with a cache that was filled with the same keys and values. Only the first
    head of each `group` of keys and values counts.
    """

    ring: int
    ulysses: int
    heads: int = 5
    text: int = 7
    image: int = 45
    batch: int = 1
    patches: int = 1
    shares: tuple[int, ...] = ()
    group: int = 1
    head_chunks: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def inputs(self) -> Tensor:
        return qkv(self.text + self.image, self.heads, self.batch)

    def error(self, found: Tensor) -> float:
        """Return the largest absolute difference from torch's attention. NaN counts as infinite."""
        difference = (found.double() - torch_attention(self.inputs, self.group)).abs().max()
        return difference.nan_to_num(torch.inf).item()


def attend_over_ranks(splits: Sequence[Split]) -> list[Tensor]:
    """Return for each split the attention of all tokens, with each rank's tokens in their positions."""
    made = [_over_ranks(split) for split in splits]
    results = run_in_turn([(split.ranks, on_rank) for split, (on_rank, _) in zip(splits, made, strict=True)])
    return [join(result) for result, (_, join) in zip(results, made, strict=True)]


def _over_ranks(given: Split) -> tuple[OnRank, Callable[[list[list[Tensor]]], Tensor]]:
    """Return the function of each rank, and the function that joins the results of all ranks."""
    inputs, text, patches, ranks = given.inputs, given.text, given.patches, given.ranks
    runs = [torch.arange(given.image)[run] for run in cut(given.image, patches)]
    plan = cpu_plan(ring=given.ring, ulysses=given.ulysses, shares=given.shares)
    streams = [by_shares(plan.shares, text, [torch.arange(text)]), by_shares(plan.shares, given.image, runs)]
    chunks = [[stream.only(patch) for stream in streams] for patch in range(patches)]
    attend = choose_kernel("auto", CPU, inputs.dtype, 16).attend

    def split(placements: Sequence[Placement]) -> SequenceSplit:
        counts = tuple(len(indices(placements, rank)) for rank in range(ranks))
        kv_heads = given.heads // given.group
        return SequenceSplit(counts, given.heads, given.ring, given.ulysses, plan.shares, kv_heads)

    def local(placements: Sequence[Placement], rank: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = inputs[:, :, indices(placements, rank)]
        return q, k[:, :, :: given.group], v[:, :, :: given.group]

    def attend_on(rank: int) -> list[Tensor]:
        mesh = build_mesh(plan, CPU, Meter())
        around = range(mesh.ring.rank * given.ulysses, (mesh.ring.rank + 1) * given.ulysses)
        cache = KVCache(slots_of(streams, around, patches)) if patches > 1 else None
        keep_kv = None if cache is None else cache.fill
        layout = UspLayout(mesh, split(streams), attend, given.head_chunks)
        whole = usp_attention(*local(streams, rank), layout, keep_kv=keep_kv)
        if cache is None:
            return [whole]
        parts = [
            patch_attention(*local(chunk, rank), UspLayout(mesh, split(chunk), attend), patch, cache)
            for patch, chunk in enumerate(chunks)
        ]
        return [whole, *parts]

    def joined(results: list[list[Tensor]]) -> Tensor:
        result = torch.full_like(inputs[0], float("nan"))
        for rank, (whole, *parts) in enumerate(results):
            result[:, indices(streams, rank)] = whole
            for chunk, part in zip(chunks, parts, strict=patches > 1):
                torch.testing.assert_close(
                    result[:, indices(chunk, rank)], part, rtol=1e-5, atol=1e-6, msg=lambda text: f"{given}: {text}"
                )
        return result

    return attend_on, joined


def indices(placements: Sequence[Placement], rank: int) -> Tensor:
    """Return the positions of a rank's tokens in the whole sequence (text first)."""
    text, image = placements
    return torch.cat([text.ranks[rank], text.length + image.ranks[rank]])


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
    errors = {split: split.error(found) for split, found in zip(splits, attend_over_ranks(splits), strict=True)}
    assert {split: error for split, error in errors.items() if error > TOLERANCE} == {}


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
    for split, expected, *found in zip(CHUNKED, once, *chunked, strict=True):
        assert split.error(expected) <= TOLERANCE, split
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-6, atol=1e-6)
            # The merge's vectorisation depends on the number of heads.
            assert split.ring > 1 or torch.equal(each, expected), split


def test_merged_blocks_of_keys_equal_attention_over_all_keys() -> None:
    q, k, v = inputs = qkv(50, 2)
    attend = choose_kernel("sdpa", CPU, torch.float32, 16).attend
    partial = OnlineSoftmax(q)
    for block in (slice(0, 1), slice(1, 30), slice(30, 50)):
        partial.add(*attend(q, k[:, block], v[:, block]))
    torch.testing.assert_close(partial.result().double(), torch_attention(inputs), rtol=1e-5, atol=1e-6)


def test_a_kernel_that_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(Refused, match=r"flash cannot be used: flash-attn runs on GPUs only .* use auto or sdpa"):
        choose_kernel("flash", CPU, torch.bfloat16, 128)
    with pytest.raises(Refused, match="use one of auto, sdpa, flash"):
        choose_kernel("xformers", CPU, torch.bfloat16, 128)


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
