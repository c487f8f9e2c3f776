"""Z-Image and Lumina 2: refiners of the picture, then blocks of text and picture, one behind the other.

The text's own refiners run on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..spread.declaration import (
    Along,
    Argument,
    Attention,
    Declaration,
    Group,
    LengthLess,
    Pictured,
    PythonFunction,
    Same,
    Segments,
    Spread,
)

MULTIPLE = 32
"""Z-Image pads the picture's tokens to a multiple of this, at their end."""


def _declaration(picture: Pictured) -> Declaration:
    arguments: Mapping[str, Argument] = {
        "freqs_cis": Along(("x",), dim=1),
        "adaln_input": Same(rows=(1, 2)),
        "timestep_zero_index": Segments("x"),
    }
    blocks = (
        Group(
            path,
            streams={"x": picture},
            arguments=arguments,
            attentions=PythonFunction(_attentions),
            modulations=("adaLN_modulation",),
            returns=("x",),
        )
        for path in ("noise_refiner", "layers")
    )
    head: Mapping[str, Argument] = {"c": Same(rows=(1, 2)), "timestep_zero_index": Segments("x")}
    return Declaration(
        groups=tuple(blocks),
        heads=(Group("final_layer", streams={"x": picture}, arguments=head, returns=("x",)),),
        heads_of=PythonFunction(_heads),
        text_width=PythonFunction(lambda model: model.cap_embedder[1].in_features),
        positions=("rope_embedder",),
    )


def _attentions(block: Any) -> Sequence[Attention]:
    return (Spread(("x",), kv_heads=block.attention.n_local_kv_heads),)


def _heads(model: Any) -> tuple[int, int]:
    return model.n_heads, model.dim // model.n_heads


LUMINA = _declaration(Pictured(LengthLess(1)))
Z_IMAGE = _declaration(Pictured(LengthLess(MULTIPLE)))
