"""Tiny MiniMax-H3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.support.tiny.family import HEADS, Tiny, of_class
from tests.support.tiny.models import draw


def _minimax(**settings: Any) -> Callable[[Any, Any], Any]:
    def make(_: Any, operations: Any) -> Any:
        model = of_class(
            "minimax.model.MiniMaxH3Model", hidden_size=HEADS * 128, num_layers=3, token_refiner_num_layers=2,
            num_attention_heads=HEADS, ffn_hidden_size=128, text_dim=40, timestep_input_dim=32, time_embed_hidden_size=64,
            time_embed_dim=64, **settings,
        )(None, operations)  # fmt: skip
        model.rope.inv_freq.copy_(100 ** -torch.linspace(0, 1, 16))
        if model.use_adaln_curves:
            model.adaln_t_table.copy_(draw(*model.adaln_t_table.shape, seed=7))
        return model

    return make


TINY: Mapping[str, Tiny] = {
    "minimax": Tiny(_minimax(), (), 40),
    "minimax_curves": Tiny(_minimax(adaln_curve_grid=16), (), 40),
}
