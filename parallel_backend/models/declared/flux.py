"""FLUX.1, FLUX.2 and Chroma: double blocks of text and picture, and single blocks of one stream, text then picture."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...declaration import (
    AlignedToEnd,
    BlockGroup,
    Declaration,
    DistributedAttention,
    FirstPatchTokens,
    LatentTokens,
    PerToken,
    PythonFunction,
    Replicated,
    TokenRanges,
)

ONE_OR_TWO = Replicated(vectors=(1, 2))
"""References or a first frame with a timestep of zero have a second vector of modulation."""

DOUBLE = BlockGroup(
    "double_blocks",
    streams={"img": LatentTokens(), "txt": FirstPatchTokens()},
    arguments={"pe": PerToken(("txt", "img"), dim=2), "vec": ONE_OR_TWO, "modulation_dims_img": TokenRanges("img")},
    attentions=(DistributedAttention(("txt", "img")),),
    modulations=("img_mod", "txt_mod"),
    returns=("img", "txt"),
)
SINGLE = BlockGroup(
    "single_blocks",
    streams={"x": LatentTokens(AlignedToEnd())},
    arguments={"pe": PerToken(("x",), dim=2), "vec": ONE_OR_TWO, "modulation_dims": TokenRanges("x")},
    attentions=(DistributedAttention(("x",)),),
    modulations=("modulation",),
    returns=("x",),
)
CONTROL = {"input": DOUBLE.path, "output": SINGLE.path}
MASK = {"attention_mask": "set strength_type to multiply in Apply Style Model, which adds it"}


def _heads(model: Any) -> tuple[int, int]:
    return model.num_heads, model.hidden_size // model.num_heads


def _methods(model: Any) -> tuple[str, ...]:
    """Return the supported layouts of references; empty if all are supported.

    A timestep of zero for references needs global modulation: a block's own modulation cannot separate references from the
    picture.
    """
    return () if model.params.global_modulation else ("offset", "index", "uxo")


FLUX = Declaration(
    groups=(DOUBLE, SINGLE),
    output_layers=(
        BlockGroup(
            "final_layer",
            streams={"x": LatentTokens()},
            arguments={"vec": ONE_OR_TWO, "modulation_dims": TokenRanges("x")},
            returns=("x",),
        ),
    ),
    attention_heads=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.params.context_in_dim),
    methods=_methods,
    pooled_width=lambda model: model.params.vec_in_dim or 0,
    control=CONTROL,
    unsupported_conditioning=MASK,
    positions=("pe_embedder",),
)
CHROMA = Declaration(
    groups=(DOUBLE, SINGLE),
    output_layers=(
        BlockGroup("final_layer", streams={"x": LatentTokens()}, arguments={"vec": Replicated()}, returns=("x",)),
    ),
    attention_heads=PythonFunction(_heads),
    text_width=PythonFunction(lambda model: model.params.context_in_dim),
    control=CONTROL,
    unsupported_conditioning=MASK,
    positions=("pe_embedder",),
)
# The last layers read the latent and convolve over the picture's pixels, so they need the whole picture.
CHROMA_RADIANCE = replace(CHROMA, output_layers=(), whole_picture=True)
