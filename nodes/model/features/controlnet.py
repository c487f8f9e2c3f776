"""A ControlNet's output, as ComfyUI hands it to a model, as residuals of blocks that the workers add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ....parallel_backend.errors import Refused
from ....parallel_backend.wire.to_worker import RESIDUAL, BlockResiduals

OTHER = "use a ControlNet that was made for this model."

Control: TypeAlias = Mapping[str, Sequence[Tensor | None]]


def residuals_of(
    control: Control, blocks: Mapping[str, range], size: tuple[int, int, int]
) -> tuple[BlockResiduals, dict[str, Tensor]] | None:
    """Which tensor is added after which block, and the tensors, each once; None if there is nothing to add.

    Args:
        control: ComfyUI's lists of tensors `[batch or 1, tokens, features]` or None.
        blocks: the blocks that each list goes with; tensors for blocks that the model has not are left out, as in ComfyUI.
        size: batch, image tokens and features.

    Raises:
        Refused: it is a ControlNet for another model.
    """
    by_block: dict[int, Tensor] = {}
    for kind, tensors in control.items():
        if kind not in blocks and any(tensor is not None for tensor in tensors):
            raise Refused(f"the ControlNet changes {kind} blocks, which this model does not have: {OTHER}")
        by_block |= {
            block: tensor for block, tensor in zip(blocks.get(kind, ()), tensors, strict=False) if tensor is not None
        }
    if not by_block:
        return None
    batch, tokens, features = size
    for tensor in by_block.values():
        fits = tensor.ndim == 3 and tensor.shape[0] in (1, batch) and tensor.shape[1] <= tokens
        if not fits or tensor.shape[2] != features:
            raise Refused(
                f"the ControlNet gives tensors of {list(tensor.shape)} and this job takes {list(size)}: {OTHER}"
            )
    distinct = {id(tensor): tensor for tensor in by_block.values()}
    rows = max(tensor.shape[0] for tensor in distinct.values())
    dtypes = {tensor.dtype for tensor in distinct.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    named = {f"{RESIDUAL}{number}": tensor for number, tensor in enumerate(distinct.values())}
    names = dict(zip(distinct, named, strict=True))
    residuals = BlockResiduals(
        {block: names[id(t)] for block, t in by_block.items()}, rows, str(dtype).removeprefix("torch.")
    )
    return residuals, {name: _whole(tensor, rows, tokens, dtype) for name, tensor in named.items()}


def _whole(tensor: Tensor, rows: int, tokens: int, dtype: Any) -> Tensor:
    """With nothing for the tokens that it has no part of."""
    return F.pad(tensor.to(dtype), (0, 0, 0, tokens - tensor.shape[1])).expand(rows, -1, -1)
