"""LTX-2 and 2.3: ranks divide the video's tokens, and each rank holds the sound's. Video and sound attend to each other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...declaration import (
    AttentionBias,
    BlockGroup,
    Declaration,
    DistributedAttention,
    LatentTokens,
    Options,
    PerToken,
    PerTokenObject,
    PythonFunction,
    Replicated,
    ReplicatedContext,
    ReplicatedKeys,
    ReplicatedQueries,
    ReplicatedTokens,
    rows_differ,
)
from .ltxv import of_guides


def _of_tokens(timestep: Any, positions: Tensor, length: int) -> Any:
    """Return ComfyUI's CompressedTimestep, which has a row for each frame, for the tokens at these positions."""
    if timestep.num_frames == 1:
        return timestep
    compressed: Any = type(timestep)
    rows_of_tokens = _by_token(compressed)(timestep.data, 1, per_frame=True)
    rows_of_tokens.rows = positions // (length // timestep.num_frames)
    return rows_of_tokens


@functools.cache
def _by_token(compressed: Any) -> Any:
    """Return a subclass of CompressedTimestep that computes rows for frames and then selects the rows of tokens."""

    class ByToken(compressed):  # type: ignore[misc]
        rows: Tensor

        def expand_for_computation(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            by_frame = super().expand_for_computation(*args, **kwargs)
            return tuple(values.index_select(1, self.rows.to(values.device)) for values in by_frame)

    return ByToken


def _text_widths(model: Any) -> tuple[int, ...]:
    """Return the possible widths of the text: one text for video and sound or two, before or after the connector layers."""
    both = model.cross_attention_dim + model.audio_cross_attention_dim
    return tuple(dict.fromkeys((model.caption_channels, 2 * model.caption_channels, both)))


def _unless(*names: str, by_itself: bool = False) -> Callable[[Options], bool]:
    """Return a condition for a call of attention: no option of these names is off.

    With `by_itself`, the call is also left out if STG skips a block's self-attention.
    """

    def comes(options: Options) -> bool:
        left_out = by_itself and options.get("stg_skip_self_attn", False)
        return not left_out and all(options.get(name, True) for name in names)

    return comes


def _couples_rows(conditioning: Mapping[str, Tensor]) -> str:
    """Return "noise masks" if the noise masks of a batch differ.

    The attention between video and sound uses the largest noise of the whole batch, and frames use the mask of its first row.
    """
    masks = (conditioning.get(name) for name in ("denoise_mask", "audio_denoise_mask"))
    return "noise masks" if any(map(rows_differ, masks)) else ""


LTXAV = Declaration(
    groups=(
        BlockGroup(
            "transformer_blocks",
            streams={"vx": LatentTokens(), "ax": ReplicatedTokens()},
            tuples={"x": ("vx", "ax")},
            arguments={
                "v_context": ReplicatedContext(),
                "a_context": ReplicatedContext(),
                "attention_mask": ReplicatedContext(),
                "v_timestep": PerTokenObject("vx", _of_tokens),
                "a_timestep": ReplicatedContext(),
                "v_pe": PerToken(("vx",), dim=1),
                "a_pe": ReplicatedContext(),
                "v_cross_pe": PerToken(("vx",), dim=1),
                "a_cross_pe": ReplicatedContext(),
                "v_cross_scale_shift_timestep": PerTokenObject("vx", _of_tokens),
                "a_cross_scale_shift_timestep": ReplicatedContext(),
                "v_cross_gate_timestep": PerTokenObject("vx", _of_tokens),
                "a_cross_gate_timestep": ReplicatedContext(),
                "v_prompt_timestep": Replicated(),
                "a_prompt_timestep": Replicated(),
                "self_attention_mask": AttentionBias("vx", of_guides),
            },
            attentions=(
                DistributedAttention(("vx",), biased=True, is_called=_unless("run_vx", by_itself=True)),
                ReplicatedKeys(is_called=_unless("run_vx")),
                ReplicatedKeys("ax", is_called=_unless("run_ax", by_itself=True)),
                ReplicatedKeys("ax", is_called=_unless("run_ax")),
                ReplicatedKeys("ax", is_called=_unless("run_vx", "a2v_cross_attn")),
                ReplicatedQueries("ax", keys="vx", is_called=_unless("run_ax", "v2a_cross_attn")),
            ),
            returns=("vx", "ax"),
        ),
    ),
    output_layers=tuple(
        BlockGroup(path, streams={"input": LatentTokens()}, returns=("input",)) for path in ("norm_out", "proj_out")
    ),
    attention_heads=PythonFunction(lambda model: (model.num_attention_heads, model.attention_head_dim)),
    text_width=PythonFunction(_text_widths),
    joint_text=False,
    patch_size=PythonFunction(lambda model: model.patchifier.patch_size),
    sound=lambda model: (model.num_audio_channels, None, model.audio_frequency_bins),
    couples_rows=_couples_rows,
)
