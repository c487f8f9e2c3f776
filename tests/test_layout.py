"""The tokens and heads of each rank and patch."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from parallel_backend.declaration import FirstPatchTokens, LatentTokens
from parallel_backend.layout import SequenceSplit, cut, cut_by, length
from parallel_backend.models.sequence_parallel.picture import Picture
from parallel_backend.models.sequence_parallel.placement import Placement, by_shares, slots_of
from parallel_backend.models.sequence_parallel.token_layout import TokenLayout

numbers = st.integers(0, 5000)
degrees = st.integers(1, 8)


@given(total=numbers, shares=st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_cut_by_shares_covers_everything_once_and_in_proportion(total: int, shares: list[int]) -> None:
    runs = cut_by(total, shares)
    assert [item for run in runs for item in range(run.start, run.stop)] == list(range(total))
    for run, share in zip(runs, shares, strict=True):
        assert abs(length(run) - total * share / sum(shares)) < 1
    assert cut(total, len(shares)) == cut_by(total, [7] * len(shares))


@given(text=numbers, image=numbers, heads=st.integers(8, 40), ring=degrees, ulysses=degrees, drawn=st.data())
def test_tokens_and_heads_of_ring_and_ulysses_ranks_add_up(
    text: int, image: int, heads: int, ring: int, ulysses: int, drawn: st.DataObject
) -> None:
    shares = tuple(drawn.draw(st.lists(st.integers(1, 100), min_size=ring * ulysses, max_size=ring * ulysses)))
    split = SequenceSplit.of((text, image), heads, ring, ulysses, shares)
    assert sum(split.tokens) == text + image
    assert min(split.head_counts()) >= 1
    assert sum(split.ring_tokens()) == text + image
    assert sum(split.head_counts()) == heads
    for ring_rank in range(ring):
        assert sum(split.ulysses_tokens(ring_rank)) == split.ring_tokens()[ring_rank]


def test_a_faster_rank_has_more_heads_and_every_rank_has_one_if_there_are_enough() -> None:
    def heads_of(heads: int, *shares: int) -> list[int]:
        return SequenceSplit.of((100,), heads, 1, len(shares), shares).head_counts()

    assert heads_of(30, 1, 1, 1, 1) == [7, 8, 7, 8]
    assert heads_of(24, 100, 50) == [15, 9]
    assert heads_of(4, 1, 1, 1, 97) == [1, 1, 1, 1]
    assert heads_of(5, 1, 1, 1, 97) == [1, 1, 1, 2]


@given(group=st.integers(1, 8), groups=st.integers(1, 12), ulysses=degrees, drawn=st.data())
def test_a_rank_gets_the_key_heads_of_its_query_heads(
    group: int, groups: int, ulysses: int, drawn: st.DataObject
) -> None:
    shares = tuple(drawn.draw(st.lists(st.integers(1, 100), min_size=ulysses, max_size=ulysses)))
    split = SequenceSplit.of((100,), group * groups, 1, ulysses, shares, groups)
    for heads, shared in zip(split.query_slices(), split.kv_slices(), strict=True):
        if length(heads):
            assert {*range(shared.start, shared.stop)} == {head // group for head in range(heads.start, heads.stop)}


some = st.integers(0, 50)


@given(text=some, rows=st.integers(1, 300), references=some, patches=st.integers(1, 8), ring=degrees, ulysses=degrees)
def test_patches_partition_the_picture_and_their_slots_the_cache(
    text: int, rows: int, references: int, patches: int, ring: int, ulysses: int
) -> None:
    layout = TokenLayout((1,) * (ring * ulysses), Picture((1, 4, rows, 1), (1, 1)), patches, None)
    words, picture = layout.of(text, FirstPatchTokens()), layout.of(rows + references, LatentTokens())
    assert torch.equal(torch.cat(picture.ranks).sort().values, torch.arange(rows + references))
    first = torch.cat(picture.only(0).ranks)
    assert set(range(rows, rows + references)) <= set(first.tolist())  # references go with the first patch
    for ring_rank in range(ring):
        ranks = range(ring_rank * ulysses, (ring_rank + 1) * ulysses)
        slots = slots_of([words, picture], ranks, patches)
        cache = in_order([words, picture], ranks)
        assert torch.equal(torch.cat(slots).sort().values, torch.arange(len(cache)))
        for patch, slot in enumerate(slots):
            chunk = in_order([words.only(patch), picture.only(patch)], ranks)
            assert torch.equal(cache[slot], chunk)


def in_order(placements: Sequence[Placement], ranks: Sequence[int]) -> Tensor:
    """Return the ranks' tokens in order, text before image; each token as the number of its stream and its own."""
    held = [
        torch.stack([torch.full_like(placement.ranks[rank], stream), placement.ranks[rank]], dim=1)
        for rank in ranks
        for stream, placement in enumerate(placements)
    ]
    return torch.cat(held)


@given(degrees, st.integers(1, 12), st.integers(1, 6), st.integers(1, 5))
def test_chunks_of_heads_are_a_ranks_heads_cut_between_groups(
    ulysses: int, kv_heads: int, group: int, most: int
) -> None:
    heads = kv_heads * group
    split = SequenceSplit((1,) * ulysses, heads, 1, ulysses, (1,) * ulysses, kv_heads)
    chunks = split.head_chunks(most)
    assert len(chunks) == max(1, min(most, *split.kv_counts()))
    for rank, own in enumerate(zip(*chunks, strict=True)):
        for name, whole in (("q", split.query_slices()[rank]), ("kv", split.kv_slices()[rank])):
            runs = [getattr(runs, name) for runs in own]
            assert (runs[0].start, runs[-1].stop) == (whole.start, whole.stop)
            assert all(one.stop == following.start for one, following in pairwise(runs))
        for runs in own:
            assert {head // group for head in range(heads)[runs.q]} in ({*range(kv_heads)[runs.kv]}, set())


@given(
    runs=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    unit=st.integers(1, 7),
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_every_token_of_a_patch_is_on_one_rank_and_units_stay_together(
    runs: list[int], unit: int, shares: list[int]
) -> None:
    patches = list(torch.arange(sum(runs)).split(runs))
    placement = by_shares(shares, sum(runs), patches, unit)
    assert sorted(torch.cat(placement.ranks).tolist()) == list(range(sum(runs)))
    for number, positions in enumerate(patches):
        for held, labels in zip(placement.ranks, placement.patches, strict=True):
            own = held[labels == number]
            assert not own.numel() or (int(own[0]) - int(positions[0])) % unit == 0
