"""A ControlNet's output for a UNet that runs whole: it goes into the forward as ComfyUI gives it, if it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.errors import Refused
from .controlnet import OTHER, Control

Shapes = Mapping[str, Sequence[torch.Size]]
"""Of what a ControlNet's tensors are added to, by the list that they come from, in the order in which a model takes them."""


def shapes_in(unet: Any, x: Tensor, inputs: Mapping[str, Tensor]) -> Shapes:
    """Return the shapes in a forward of ComfyUI's UNet without computing it.

    Args:
        unet: on the meta device.
        x: `[batch, channels, height, width]`, with what is concatenated.
        inputs: `timestep`, `context` and what else it takes that is a tensor.
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
    """Refuse the output of another model's ControlNet, which ComfyUI leaves out with a line in its log.

    Raises:
        Refused: with what does not fit.
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
