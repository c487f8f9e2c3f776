"""Z-Image and Lumina 2: refiners of the picture, then blocks of one stream, the text followed by the picture.

The text's own refiners run on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...declaration import (
    AlignedToEnd,
    Argument,
    Attention,
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
    TokenRanges,
)

MULTIPLE = 32
"""The number of which Z-Image's picture tokens are a multiple, by padding at their end."""


def _declaration(picture: LatentTokens) -> Declaration:
    arguments: Mapping[str, Argument] = {
        "freqs_cis": PerToken(("x",), dim=1),
        "adaln_input": Replicated(vectors=(1, 2)),
        "timestep_zero_index": TokenRanges("x"),
    }
    blocks = (
        BlockGroup(
            path,
            streams={"x": picture},
            arguments=arguments,
            attentions=PythonFunction(_attentions),
            modulations=("adaLN_modulation",),
            returns=("x",),
        )
        for path in ("noise_refiner", "layers")
    )
    head: Mapping[str, Argument] = {"c": Replicated(vectors=(1, 2)), "timestep_zero_index": TokenRanges("x")}
    return Declaration(
        groups=tuple(blocks),
        output_layers=(BlockGroup("final_layer", streams={"x": picture}, arguments=head, returns=("x",)),),
        attention_heads=PythonFunction(_heads),
        text_width=PythonFunction(lambda model: model.cap_embedder[1].in_features),
        positions=("rope_embedder",),
    )


def _attentions(block: Any) -> Sequence[Attention]:
    return (DistributedAttention(("x",), kv_heads=block.attention.n_local_kv_heads),)


def _heads(model: Any) -> tuple[int, int]:
    return model.n_heads, model.dim // model.n_heads


LUMINA = _declaration(LatentTokens(AlignedToEnd()))
Z_IMAGE = _declaration(LatentTokens(AlignedToEnd(MULTIPLE)))
