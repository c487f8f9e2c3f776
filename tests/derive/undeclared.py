"""ComfyUI's classes without a written declaration, with random weights, and one call of each; see tests/models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_backend.derive.calls import ModelCall, Sizes, Subject
from parallel_backend.models.comfyui.small.case import HEADS, TEXT, WIDTH, Builder
from tests.support.tiny.models import draw, randomise

model_of = Builder().model

More = Callable[[int], Mapping[str, Any]]
"""The model's inputs besides its text, for a number of text tokens."""


def _subject(model: Any, channels: int, sizes: Sizes, given: More = lambda tokens: {}) -> Subject:
    def call(size: Sizes) -> ModelCall:
        latent = draw(1, channels, *size.picture, seed=1)
        arguments = {"context": draw(1, size.text, TEXT, seed=2), **given(size.text)}
        return ModelCall(latent, torch.tensor([0.6]), arguments)

    return Subject(randomise(model, seed=5), call, sizes)


def _hunyuan_dit() -> Subject:
    """Return HunyuanDiT, whose later blocks take the output of earlier ones. The second encoder's text is one token longer."""
    model = model_of(
        "hydit.models.HunYuanDiT",
        hidden_size=WIDTH, depth=4, num_heads=HEADS, text_states_dim=TEXT, text_states_dim_t5=64, text_len=4, text_len_t5=6,
    )  # fmt: skip

    def given(tokens: int) -> dict[str, Tensor]:
        return {
            "encoder_hidden_states_t5": draw(1, tokens + 1, 64, seed=3),
            "text_embedding_mask": torch.ones(1, tokens),
            "text_embedding_mask_t5": torch.ones(1, tokens + 1),
        }

    return _subject(model, 4, Sizes((10, 14), 7), given)


def _cogvideox() -> Subject:
    model = model_of(
        "cogvideo.model.CogVideoXTransformer3DModel",
        num_attention_heads=HEADS, attention_head_dim=64, time_embed_dim=64, text_embed_dim=TEXT, num_layers=3,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    return _subject(model, 16, Sizes((3, 8, 10), 7))


def _pixart() -> Subject:
    model = model_of(
        "pixart.pixartms.PixArtMS",
        hidden_size=WIDTH, depth=3, num_heads=HEADS, caption_channels=TEXT, micro_condition=False, pe_interpolation=1,
    )  # fmt: skip
    return _subject(model, 4, Sizes((36, 40), 7))


def _causal_wan() -> Subject:
    model = model_of(
        "wan.ar_model.CausalWanModel", dim=WIDTH, ffn_dim=256, text_dim=TEXT, num_heads=HEADS, num_layers=3
    )
    return _subject(model, 16, Sizes((3, 7, 10), 7))


UNDECLARED: Mapping[str, Callable[[], Subject]] = {
    "hunyuan-dit": _hunyuan_dit,
    "cogvideox": _cogvideox,
    "pixart": _pixart,
    "causal wan": _causal_wan,
}
