"""HunyuanVideo, its 1.5 and HunyuanImage 2.1: FLUX's blocks; a reference comes before the video, text may be masked.

The text's own refiner, and what it makes of glyphs and of a picture, run on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from ..spread.declaration import Declaration, Pictured, Segments, TextMask
from . import flux

DOUBLE = replace(
    flux.DOUBLE,
    streams={**flux.DOUBLE.streams, "img": Pictured(lambda length, picture: length - picture)},
    arguments={
        **flux.DOUBLE.arguments,
        "modulation_dims_txt": Segments("txt"),
        "attn_mask": TextMask("txt", behind=("img",)),
    },
)
SINGLE = replace(flux.SINGLE, arguments={**flux.SINGLE.arguments, "attn_mask": TextMask("x")})

HUNYUAN_VIDEO = Declaration(
    groups=(DOUBLE, SINGLE),
    heads=flux.FLUX.heads,
    heads_of=flux.FLUX.heads_of,
    text_width=flux.FLUX.text_width,
    masked=True,
    divides=True,
    positions=flux.FLUX.positions,
    sigmas=lambda model: model.time_r_in is not None,  # MeanFlow: the next step's
)
