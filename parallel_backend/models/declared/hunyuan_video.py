"""HunyuanVideo, its 1.5 and HunyuanImage 2.1: FLUX's blocks; a reference comes before the video, text may be masked.

The text's own refiner, and what it makes of glyphs and of a picture, run on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from torch import Tensor

from ...declaration import AlignedToEnd, Declaration, LatentTokens, TextMask, TokenRanges, rows_differ
from . import flux

DOUBLE = replace(
    flux.DOUBLE,
    streams={**flux.DOUBLE.streams, "img": LatentTokens(AlignedToEnd(1))},
    arguments={
        **flux.DOUBLE.arguments,
        "modulation_dims_txt": TokenRanges("txt"),
        "attn_mask": TextMask("txt", after=("img",)),
    },
)
SINGLE = replace(flux.SINGLE, arguments={**flux.SINGLE.arguments, "attn_mask": TextMask("x")})


def _couples_rows(conditioning: Mapping[str, Tensor]) -> str:
    """Of two rows with a first frame, the guidance of the one is added to what modulates the first frame of both, that of the
    other to what modulates the other frames."""
    return "guidance" if "guiding_frame_index" in conditioning and rows_differ(conditioning.get("guidance")) else ""


HUNYUAN_VIDEO = Declaration(
    groups=(DOUBLE, SINGLE),
    output_layers=flux.FLUX.output_layers,
    attention_heads=flux.FLUX.attention_heads,
    text_width=flux.FLUX.text_width,
    takes_text_mask=True,
    divisible_latent=True,
    positions=flux.FLUX.positions,
    sigmas=lambda model: model.time_r_in is not None,  # MeanFlow: the next step's
    couples_rows=_couples_rows,
)
