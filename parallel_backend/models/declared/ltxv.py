"""LTX-Video: blocks of the video alone, a timestep for each token, text attended to."""

from __future__ import annotations

from typing import Any

from ..spread.declaration import Along, ByFrame, Declaration, Group, Local, Pictured, Same, Spread


def _text_width(model: Any) -> int:
    """What the text is projected from, or what it is projected to where that is done before it comes here."""
    width: int = model.inner_dim if model.caption_proj_before_connector else model.caption_channels
    return width


LTXV = Declaration(
    groups=(
        Group(
            "transformer_blocks",
            streams={"x": Pictured()},
            arguments={
                "context": Same(),
                "attention_mask": Same(),
                "timestep": ByFrame("x", dims=3),
                "pe": Along(("x",), dim=1),
                "prompt_timestep": Same(),
            },
            attentions=(Spread(("x",)), Local()),
            returns=("x",),
        ),
    ),
    heads=tuple(Group(path, streams={"input": Pictured()}, returns=("input",)) for path in ("norm_out", "proj_out")),
    heads_of=lambda model: (model.num_attention_heads, model.attention_head_dim),
    text_width=_text_width,
    joint_text=False,
    patch_size=lambda model: model.patchifier.patch_size,
)
