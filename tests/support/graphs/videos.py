"""Tensors that the nodes of several families add to a video's prompt."""

from __future__ import annotations

import torch

from tests.support.tiny.models import draw

PICTURE = {"concat_latent_image": draw(1, 16, 3, 8, 10, seed=22)}
FIRST = PICTURE | {"concat_mask": (torch.arange(3) > 0).float().view(1, 1, 3, 1, 1).expand(1, 1, 3, 8, 10).contiguous()}
SEEN = {"clip_vision_output": draw(1, 5, 1280, seed=21)}
PERSON = ((16, 1, 8, 10),)
