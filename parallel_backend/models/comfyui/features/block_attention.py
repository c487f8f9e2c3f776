"""Attention that a node of ComfyUI's hands to blocks by standing in for them, in a worker: made of ComfyUI's own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....errors import Refused
from ..importing import import_comfyui
from .attention_override import ObjectRecipe, named

TOKENS, ATTENTION, BLOCK = "img", "attention", "original_block"
"""ComfyUI's names: of what a block is given its tokens, and attention in its own's place; and the block itself."""

Replacement = Callable[[dict[str, Any], dict[str, Any]], Any]
"""As ComfyUI's models call what stands in for a block: with its arguments and the block."""


@dataclass(frozen=True)
class BlockAttentionRecipe:
    """What a worker needs to make again what stands in for blocks.

    Attributes:
        maker: the function of ComfyUI's that makes each, as `module:name`.
        block: its argument that is the model's block.
        objects: its arguments that are objects of ComfyUI's classes, the same ones for all blocks.
        blocks: of each block its path in the model, its kind and number in ComfyUI's words, and the maker's other arguments.
    """

    maker: str
    block: str
    objects: Mapping[str, ObjectRecipe]
    blocks: Sequence[tuple[str, str, int, Mapping[str, Any]]]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> BlockAttentionRecipe:
        """The recipe that came with a call; what is empty does not travel."""
        objects = {name: ObjectRecipe(**{"values": {}, **each}) for name, each in fields.get("objects", {}).items()}
        return cls(fields["maker"], fields["block"], objects, [(*block, {})[:4] for block in fields["blocks"]])

    def make(self, seen: Callable[[str], Any]) -> dict[tuple[str, int], Replacement]:
        """What it makes, by kind and number; `seen` says as what it is given the block of a path."""
        import_comfyui()
        objects = {name: each.make() for name, each in self.objects.items()}
        return {
            (kind, number): named(self.maker)(**{self.block: seen(path)}, **objects, **values)
            for path, kind, number, values in self.blocks
        }


class BlockAttention:
    """What stands in for blocks during one run: what it keeps from step to step is of this rank's heads."""

    def __init__(self) -> None:
        self._replacements: dict[tuple[str, int], Replacement] = {}

    def replacements(
        self, fields: Mapping[str, Any], seen: Callable[[str], Any]
    ) -> dict[str, dict[tuple[str, int], Replacement]]:
        """For ComfyUI's `patches_replace`; `fields` are a recipe's, `seen` says how it sees the block of a path."""
        if not self._replacements:
            built = BlockAttentionRecipe.of(fields).make(seen)
            self._replacements = {location: handing_attention(each) for location, each in built.items()}
        return {"dit": self._replacements}


def handing_attention(replacement: Replacement) -> Replacement:
    """What stands in for a block, held to this: it hands the block attention, and changes nothing else.

    Of tokens, most of which are on other ranks, it sees how many there are.
    """

    def checked(arguments: dict[str, Any], more: dict[str, Any]) -> Any:
        tokens, block = arguments[TOKENS], more[BLOCK]
        visible = {**arguments, TOKENS: _Shape(tokens.shape, tokens.dtype, tokens.device)}
        outputs: list[Any] = []
        began = False

        def run(changed: dict[str, Any]) -> Any:
            nonlocal began
            began = True
            changed_names = sorted(
                name for name in {*visible, *changed} - {ATTENTION} if changed.get(name) is not visible.get(name)
            )
            if changed_names:
                raise _refused(f"changes {' and '.join(changed_names)} of its arguments")
            if outputs:
                raise _refused("runs it twice")
            outputs.append(block({**changed, TOKENS: tokens}))
            return outputs[0]

        try:
            output = replacement(visible, {**more, BLOCK: run})
        except TypeError as error:
            if began:
                raise
            raise _refused("looks at more of its tokens than how many they are") from error
        if not outputs or output is not outputs[0]:
            raise _refused("gives something else than the block does")
        return output

    return checked


@dataclass(frozen=True)
class _Shape:
    """All that is told of tokens."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __getattr__(self, name: str) -> Any:
        raise _refused(f"looks at {name} of its tokens")


def _refused(what: str) -> Refused:
    return Refused(
        f"what a node puts in the place of the model's blocks {what}, where this pack knows of attention alone: remove that "
        "node, or use Load Diffusion Model."
    )
