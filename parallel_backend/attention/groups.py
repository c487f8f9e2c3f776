"""Heads of queries that share heads of keys and values: these are repeated last, behind exchange, ring and cache."""

from __future__ import annotations

from torch import Tensor

from ..layout import SequenceSplit
from .packages import Attend


def of_groups(attend: Attend, split: SequenceSplit, ulysses_rank: int) -> Attend:
    """A kernel for a Ulysses rank's own heads, made of one that takes as many heads of k and v as of q."""
    if split.group == 1:
        return attend
    skipped = split.head_runs()[ulysses_rank].start % split.group  # of its first group: they are the rank's before

    def attend_groups(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(split.group, dim=2)[:, :, skipped : skipped + q.shape[2]] for x in (k, v))
        return attend(q, k, v)

    return attend_groups
