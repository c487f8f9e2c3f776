"""HunyuanVideo, its 1.5 and HunyuanImage 2.1: FLUX's blocks; a reference comes before the video, text may be masked.

The text's own refiner, and what it makes of glyphs and of a picture, run on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from ..spread.declaration import Pictured, Segments, TextMask
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

HUNYUAN_VIDEO = replace(
    flux.FLUX,
    groups=(DOUBLE, SINGLE),
    lacking=lambda model: "the next step's noise level (MeanFlow)" if model.time_r_in is not None else None,
)
