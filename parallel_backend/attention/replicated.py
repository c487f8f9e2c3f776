"""Attention of queries that every rank has to keys that are spread over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from .merge import PartialAttention
from .packages import Attend


def of_all_keys(ranks: Communicator, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each rank attends to its own keys, and all merge the results in the order of ranks. A collective.

    Args:
        q: `[batch, queries, heads, head_dim]`, the same on all ranks.
        k, v: `[batch, this rank's keys, heads, head_dim]`; there may be none.

    Returns:
        As q, the same bits on all ranks.
    """
    if k.shape[1]:
        out, lse = attend(q, k, v)
        lse = lse.transpose(1, 2).unsqueeze(-1).float()
    else:
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.float32)
    mine = torch.cat([out.float(), lse], dim=-1)
    everyone = ranks.gather(mine.flatten(2), [q.shape[1]] * ranks.size).unflatten(2, mine.shape[2:])
    partial = PartialAttention(q)
    for each in everyone.chunk(ranks.size, dim=1):
        partial.add(each[..., :-1], each[..., -1].transpose(1, 2))
    return partial.result()
