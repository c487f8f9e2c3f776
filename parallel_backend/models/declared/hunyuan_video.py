"""HunyuanVideo, HunyuanVideo 1.5 and HunyuanImage 2.1: FLUX's blocks. A reference precedes the video; text may be masked.

The text's own refiner and the layers for glyphs and for a picture run on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace
from torch import Tensor

from ...declaration import AlignedToEnd, Declaration, LatentTokens, TextMask, TokenRanges, rows_differ
from . import flux

DOUBLE = replace(
    flux.DOUBLE,
    streams={**flux.DOUBLE.streams, "img": LatentTokens(AlignedToEnd())},
    arguments={
        **flux.DOUBLE.arguments,
        "modulation_dims_txt": TokenRanges("txt"),
        "attn_mask": TextMask("txt", after=("img",)),
    },
)
SINGLE = replace(flux.SINGLE, arguments={**flux.SINGLE.arguments, "attn_mask": TextMask("x")})


def _couples_rows(conditioning: Mapping[str, Tensor]) -> str:
    """Return "guidance" if rows with a first frame have different guidance.

    ComfyUI's model adds the guidance of one row to the modulation of the first frame, for both rows. The guidance of the other
    row goes into the modulation of the other frames.
    """
    return "guidance" if "guiding_frame_index" in conditioning and rows_differ(conditioning.get("guidance")) else ""


HUNYUAN_VIDEO = Declaration(
    groups=(DOUBLE, SINGLE),
    output_layers=flux.FLUX.output_layers,
    attention_heads=flux.FLUX.attention_heads,
    text_width=flux.FLUX.text_width,
    takes_text_mask=True,
    divisible_latent=True,
    positions=flux.FLUX.positions,
    sigmas=lambda model: model.time_r_in is not None,  # MeanFlow reads the next step's sigma
    couples_rows=_couples_rows,
)
