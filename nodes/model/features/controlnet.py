"""A ControlNet's output: residuals that the workers add after blocks, or lists that an unsharded UNet's forward adds."""

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
    """Return the residuals by block, and their tensors, each once; None if there is nothing to add.

    Args:
        control: ComfyUI's lists of tensors `[batch or 1, tokens, features]` or None.
        blocks: the blocks that each list belongs to. Tensors for blocks that the model lacks are dropped, as in ComfyUI.
        size: batch, image tokens and features.

    Raises:
        Refused: the ControlNet is for another model.
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
    """Return a residual with zeros for the tokens that it lacks, repeated for all rows."""
    return F.pad(tensor.to(dtype), (0, 0, 0, tokens - tensor.shape[1])).expand(rows, -1, -1)


Shapes = Mapping[str, Sequence[torch.Size]]
"""Shapes of a UNet's activations, in the order in which the UNet computes them.

The keys are the names of a ControlNet's lists of outputs ("input", "middle", "output"); the tensors of a list are added to
activations of these shapes.
"""


def shapes_in(unet: Any, x: Tensor, inputs: Mapping[str, Tensor]) -> Shapes:
    """Return the shapes of a UNet's activations without computing them.

    Args:
        unet: ComfyUI's UNet, on the meta device.
        x: `[batch, channels, height, width]`, including concatenated latents.
        inputs: `timestep`, `context` and the other tensors that the UNet takes.
    """
    shapes: dict[str, list[torch.Size]] = {"input": [], "middle": [], "output": []}

    def of_input(h: Tensor, _: Any) -> Tensor:
        shapes["input"].append(h.shape)
        return h

    def of_middle(args: Mapping[str, Any]) -> Mapping[str, Any]:
        shapes["middle"].append(args["h"].shape)
        return args

    def of_output(h: Tensor, skipped: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        shapes["output"].append(skipped.shape)
        return h, skipped

    patches = {
        "input_block_patch": [of_input],
        "middle_block_after_patch": [of_middle],
        "output_block_patch": [of_output],
    }
    options = {"patches": patches, "optimized_attention_override": lambda _, query, *rest, **more: query}
    tensors = {name: tensor.to("meta") for name, tensor in inputs.items()}
    unet(x.to("meta"), tensors.pop("timestep"), transformer_options=options, **tensors)
    return shapes


def refuse_other_control(control: Control, shapes: Shapes) -> None:
    """Refuse the output of another model's ControlNet, which ComfyUI would drop with a line in its log.

    Raises:
        Refused: a list is too long, or a tensor does not fit.
    """
    for kind, tensors in control.items():
        expected = shapes.get(kind, ())
        wrong = f"{len(tensors)} tensors for {len(expected)} {kind} blocks" if len(tensors) > len(expected) else None
        for shape, tensor in zip(expected, reversed(tensors), strict=False):
            if tensor is not None and not _fits(tensor.shape, shape):
                wrong = f"tensors of {list(tensor.shape)} for the {list(shape)} of {kind} blocks"
        if wrong is not None:
            raise Refused(f"the ControlNet gives {wrong} of this model: {OTHER}")


def _fits(shape: torch.Size, target: torch.Size) -> bool:
    """Return True if a tensor of this shape can be added in place to a tensor of the target shape."""
    return len(shape) == len(target) and all(
        size in (1, expected) for size, expected in zip(shape, target, strict=True)
    )
