import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.layout import TokenLayout, cut, length

numbers = st.integers(0, 5000)
degrees = st.integers(1, 8)


@given(total=numbers, parts=degrees)
def test_cut_covers_everything_once_and_evenly(total: int, parts: int) -> None:
    runs = cut(total, parts)
    assert [item for run in runs for item in range(run.start, run.stop)] == list(range(total))
    assert max(map(length, runs)) - min(map(length, runs)) <= 1


@given(text=numbers, image=numbers, heads=st.integers(8, 40), ring=degrees, ulysses=degrees)
def test_what_ring_and_ulysses_ranks_hold_adds_up(text: int, image: int, heads: int, ring: int, ulysses: int) -> None:
    layout = TokenLayout(text, (slice(0, image),), heads, ring, ulysses)
    assert sum(layout.tokens(rank) for rank in range(layout.ranks)) == text + image
    assert sum(layout.ring_tokens()) == text + image
    assert sum(layout.head_counts()) == heads
    for ring_rank in range(ring):
        assert sum(layout.ulysses_tokens(ring_rank)) == layout.ring_tokens()[ring_rank]


@pytest.mark.parametrize(("text", "image"), [(6572 - 6336, 6336), (6592 - 6336, 6336)])
def test_the_token_counts_that_fail_elsewhere_are_ordinary(text: int, image: int) -> None:
    layout = TokenLayout(text, (slice(0, image),), 24, ring=2, ulysses=2)
    assert [layout.tokens(rank) for rank in range(4)] == [(text + image) // 4] * 4


some = st.integers(0, 50)


@given(text=some, image=st.integers(0, 300), patches=st.integers(1, 8), ring=degrees, ulysses=degrees)
def test_patches_cut_the_picture_once_and_their_slots_cut_the_cache_once(
    text: int, image: int, patches: int, ring: int, ulysses: int
) -> None:
    layout = TokenLayout(text, tuple(cut(image, patches)), 8, ring, ulysses)
    held = sorted(
        item for rank in range(layout.ranks) for run in layout.image(rank) for item in range(run.start, run.stop)
    )
    assert held == list(range(image))
    for ring_rank in range(ring):
        slots = [slot for patch in range(patches) for slot in layout.slots(ring_rank, patch)]
        items = sorted(item for slot in slots for item in range(slot.start, slot.stop))
        assert items == list(range(layout.ring_tokens()[ring_rank]))
        ranks = range(ring_rank * ulysses, (ring_rank + 1) * ulysses)
        cache = [token for rank in ranks for token in in_order(layout, rank)]
        for patch in range(patches):
            chunk = [token for rank in ranks for token in in_order(layout.only(patch), rank)]
            assert [token for slot in layout.slots(ring_rank, patch) for token in cache[slot]] == chunk
    joined = torch.tensor(
        [item for rank in range(layout.ranks) for run in layout.image(rank) for item in range(image)[run]]
    )
    assert torch.equal(layout.in_order(joined.view(1, -1, 1)).view(-1), torch.arange(image))


def in_order(layout: TokenLayout, rank: int) -> list[tuple[str, int]]:
    """What a rank holds: text, image."""
    runs = [("text", layout.text(rank))]
    runs += [("image", run) for run in layout.image(rank)]
    return [(kind, token) for kind, run in runs for token in range(run.start, run.stop)]
