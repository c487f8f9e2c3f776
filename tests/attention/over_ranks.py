"""Attention of random tokens over ranks, in one call and patch by patch, and torch's own attention of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from parallel_backend.attention.codec import EXACT, Codec
from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.attention.patches import KVCache, patch_attention
from parallel_backend.attention.sequence_parallel import UspLayout, usp_attention
from parallel_backend.comm.meter import Meter
from parallel_backend.layout import SequenceSplit, cut
from parallel_backend.mesh import build_mesh
from parallel_backend.models.sequence_parallel.placement import Placement, by_shares, slots_of
from tests.support.plans import cpu_plan
from tests.support.ranks import OnRank, run_in_turn

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""The largest absolute difference from torch's attention in fp64."""


def torch_attention(inputs: Iterable[Tensor], group: int = 1) -> Tensor:
    """Return torch's attention in fp64, of which only the first head of each `group` of keys and values counts."""
    q, k, v = (x.double().transpose(1, 2) for x in inputs)
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
    head_dim: int = 16
    codec: Codec = EXACT

    @property
    def inputs(self) -> Tensor:
        """Return q, k and v."""
        tokens = self.text + self.image
        generator = torch.Generator().manual_seed(tokens * self.heads)
        return torch.randn(3, self.batch, tokens, self.heads, self.head_dim, generator=generator)

    def error(self, found: Tensor) -> float:
        """Return the largest absolute difference from torch's attention. NaN counts as infinite."""
        difference = (found.double() - torch_attention(self.inputs, self.group)).abs().max()
        return difference.nan_to_num(torch.inf).item()


class OutputOverRanks(NamedTuple):
    """The attention of all tokens in one call and, if there are several patches, patch by patch; and the bytes sent for it."""

    whole: Tensor
    patches: Tensor | None
    sent: int


def attend_over_ranks(splits: Sequence[Split]) -> list[OutputOverRanks]:
    """Return the attention of each split, with each rank's tokens in their positions."""
    made = [_over_ranks(split) for split in splits]
    results = run_in_turn(
        [(split.ring * split.ulysses, on_rank) for split, (on_rank, _) in zip(splits, made, strict=True)]
    )
    return [join(result) for result, (_, join) in zip(results, made, strict=True)]


def _over_ranks(given: Split) -> tuple[OnRank, Callable[[list[tuple[int, list[Tensor]]]], OutputOverRanks]]:
    """Return the function of each rank, and the function that joins the results of all ranks."""
    inputs, text, patches, codec = given.inputs, given.text, given.patches, given.codec
    runs = [torch.arange(given.image)[run] for run in cut(given.image, patches)]
    plan = cpu_plan(ring=given.ring, ulysses=given.ulysses, shares=given.shares)
    streams = [by_shares(plan.shares, text, [torch.arange(text)]), by_shares(plan.shares, given.image, runs)]
    chunks = [[stream.only(patch) for stream in streams] for patch in range(patches)]
    attend = choose_kernel("auto", CPU, inputs.dtype, given.head_dim).attend

    def split(placements: Sequence[Placement]) -> SequenceSplit:
        counts = tuple(len(_indices(placements, rank)) for rank in range(plan.world_size))
        kv_heads = given.heads // given.group
        return SequenceSplit(counts, given.heads, given.ring, given.ulysses, plan.shares, kv_heads)

    def local(placements: Sequence[Placement], rank: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = inputs[:, :, _indices(placements, rank)]
        return q, k[:, :, :: given.group], v[:, :, :: given.group]

    def attend_on(rank: int) -> tuple[int, list[Tensor]]:
        meter = Meter()
        mesh = build_mesh(plan, CPU, meter)
        around = range(mesh.ring.rank * given.ulysses, (mesh.ring.rank + 1) * given.ulysses)
        cache = KVCache(slots_of(streams, around, patches)) if patches > 1 else None
        keep_kv = None if cache is None else cache.fill
        layout = UspLayout(mesh, split(streams), attend, given.head_chunks, codec)
        outs = [usp_attention(*local(streams, rank), layout, keep_kv=keep_kv)]
        if cache is not None:
            for patch, chunk in enumerate(chunks):
                of_patch = UspLayout(mesh, split(chunk), attend, codec=codec)
                outs.append(patch_attention(*local(chunk, rank), of_patch, patch, cache))
        return sum(meter.sent.values()), outs

    def joined(results: list[tuple[int, list[Tensor]]]) -> OutputOverRanks:
        whole, by_patch = torch.full((2, *inputs[0].shape), torch.nan)
        for rank, (_, (out, *parts)) in enumerate(results):
            whole[:, _indices(streams, rank)] = out
            for chunk, part in zip(chunks, parts, strict=patches > 1):
                by_patch[:, _indices(chunk, rank)] = part
        return OutputOverRanks(whole, by_patch if patches > 1 else None, sum(sent for sent, _ in results))

    return attend_on, joined


def _indices(placements: Sequence[Placement], rank: int) -> Tensor:
    """Return the positions of a rank's tokens in the whole sequence (text first)."""
    text, image = placements
    return torch.cat([text.ranks[rank], text.length + image.ranks[rank]])
