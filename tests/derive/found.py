"""A declaration as it is derived, for what keeps, sends and shows one."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_backend.conditioning import Conditioning
from parallel_backend.derive.call_kind import CallKind, kind_of
from parallel_backend.diffusion import Value
from parallel_backend.models.spread.declaration import (
    Along,
    Attended,
    Behind,
    Beside,
    Boundary,
    ByFrame,
    ByPart,
    Chosen,
    Constant,
    Declaration,
    Group,
    LengthLess,
    Local,
    Pictured,
    Same,
    Segments,
    Spread,
    StartAt,
    TextLength,
    TextMask,
    Turns,
)
from tests.support.tiny.models import draw

FOUND = Declaration(
    groups=(
        Group(
            "blocks",
            streams={"x": Pictured(start=LengthLess(32)), "context": Beside()},
            returns=("x", "context"),
            arguments={
                "pe": Along(("x", "context"), dim=2),
                "runs": Segments("x"),
                "edge": Boundary("x"),
                "e": ByFrame("x", 4),
                "mask": TextMask("context", before=("x",)),
                "length": TextLength("context"),
                "vec": Same((1, 2)),
                "clip": Attended(),
                "sound": ByPart("x", each=16, whole=True),
            },
            attentions=Chosen("cross", (Spread(("x", "context"), kv_heads=2), Local()), (Spread(("x",)),)),
            attends_in="comfy.ldm.some.model",
            operations=43,
            applied=0.4286,
            copies=12.67,
        ),
        Group(
            "tail",
            streams={
                "x": Pictured(
                    grid=True, dim=2, start=StartAt(3), parts=8, behind=Behind(("references", "pose"), (1, 2, 2))
                )
            },
            returns=("x",),
        ),
    ),
    between=(Group("injector", streams={"x": Pictured()}, returns=("x",)),),
    units=Turns("blocks", "tail", (0, 5)),
    heads=(Group("head", streams={"x": Pictured()}, returns=("x",)),),
    heads_of=Constant((24, 128)),
    text_width=Constant(4096),
    patch_size=Constant((1, 2, 2)),
    joint_text=False,
    divides=True,
    whole_picture=True,
    references=frozenset({"ref_latents", "pose"}),
)
"""With every word that data has."""


def kind(text: int = 7, size: int = 8, frames: int = 3, /, **more: Tensor | Value) -> CallKind:
    tensors = {"context": draw(1, text, 16, seed=1), "mask": torch.ones(1, text)}
    values: dict[str, Value] = {"tokens": text, "scale": 1.5, "mode": "plain", "flag": False}
    for name, value in more.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is None:
            tensors.pop(name, None)
            values.pop(name, None)
        else:
            values[name] = value
    return kind_of(draw(1, 4, frames, size, size, seed=2), Conditioning(tensors, values))
