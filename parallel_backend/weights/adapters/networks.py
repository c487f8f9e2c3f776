"""Networks beside a model's blocks as plain data: what both processes know of ComfyUI's model patches."""

from __future__ import annotations

from typing import Literal

import msgspec

from ...diffusion import Value

SELF_ATTENTION = {"q": "self_attn_q_proj", "k": "self_attn_k_proj", "v": "self_attn_v_proj"}
CROSS_ATTENTION = {"q": "cross_attn_q_proj"}
"""Which of LLLite's modules changes what an attention is given, as ComfyUI's node has it."""


class NetworkPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network beside the model's blocks, a model patch of ComfyUI's (`models/comfyui/features/networks.py`).

    `weights` maps its parameters, and `inputs` what it is given (a picture, a mask, speech), to the ids of their values;
    `values` are its settings.
    """

    kind: Literal["AnimaLLLite", "QwenDiffSynth", "ZImageControl", "InfiniteTalk"]
    weights: dict[str, str]
    inputs: dict[str, str]
    values: dict[str, Value]
