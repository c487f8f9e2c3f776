"""The tests' small models as subjects: their own call, and the same call at any size."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from parallel_backend.derive.calls import ModelCall, Sizes, Subject
from parallel_backend.models.comfyui.small import Case
from tests.support.tiny.models import draw


def subject_of(case: Case) -> Subject:
    """Return the case as a subject. At another size, latents, pictures and text are drawn anew."""
    text = case.arguments["context"].shape[1]
    own = Sizes(tuple(case.x.shape[2:]), text)

    def call(sizes: Sizes) -> ModelCall:
        if sizes == own:
            return ModelCall(case.x, case.timestep, case.arguments, case.options)
        latent = draw(*case.x.shape[:2], *sizes.picture, seed=1)
        arguments = {name: _resized(name, value, own, sizes) for name, value in case.arguments.items()}
        return ModelCall(latent, _times(case.timestep, own, sizes), arguments, case.options)

    return Subject(case.model, call, own)


def _times(times: Tensor, own: Sizes, sizes: Sizes) -> Tensor:
    """Return times for another size, if there is one for each token (of one value) or for each frame."""
    if times.ndim == 3 and times.shape[1] == math.prod(own.picture):
        return torch.linspace(0, 0.9, math.prod(sizes.picture)).view(1, -1, 1)
    if times.ndim == 2 and times.shape[1] == own.picture[0]:
        return torch.linspace(0.1, 0.8, sizes.picture[0]).expand(times.shape[0], -1)
    return times


def _resized(name: str, value: Any, own: Sizes, sizes: Sizes) -> Any:
    if name == "num_tokens" and value == own.text:
        return sizes.text
    if name == "audio_embed" and value.shape[1] == own.picture[0]:  # HuMo's, for each frame
        return draw(value.shape[0], sizes.picture[0], *value.shape[2:], seed=4)
    if name == "audio_embed" and value.shape[-1] == 4 * own.picture[0]:  # S2V's
        return draw(*value.shape[:-1], 4 * sizes.picture[0], seed=4)
    return tree_map(lambda each: _tensor(each, own, sizes) if isinstance(each, Tensor) else each, value)


def _tensor(tensor: Tensor, own: Sizes, sizes: Sizes) -> Tensor:
    """Return a tensor for another size.

    The last dimensions change if they are the picture's or a multiple of them, the second one if it is the text's. Frames
    besides the picture's own keep their number.
    """
    shape, dims = list(tensor.shape), len(own.picture)
    times = {size // was for size, was in zip(shape[-2:], own.picture[-2:], strict=True)} if len(shape) > 3 else {0}
    if len(times) == 1 and [each * was for each in times for was in own.picture[-2:]] == shape[-2:]:
        (each,) = times
        shape[-2:] = [each * size for size in sizes.picture[-2:]]
        if len(shape) > 4 and dims == 3 and (shape[-3] == own.picture[0] or (each == 1 and shape[-3] > own.picture[0])):
            shape[-3] += sizes.picture[0] - own.picture[0]
    elif len(shape) in (2, 3) and shape[1] == own.text:
        shape[1] = sizes.text
    if shape == list(tensor.shape):
        return tensor
    if tensor.ndim > 3 and bool(((tensor == 0) | (tensor == 1)).all()):  # a mask
        for dim, (was, size) in enumerate(zip(tensor.shape, shape, strict=True)):
            tensor = tensor.index_select(dim, torch.arange(size) * was // size)
        return tensor
    if not tensor.is_floating_point():
        return torch.nn.functional.pad(tensor, (0, shape[1] - tensor.shape[1]), value=1)
    return draw(*shape, seed=shape[-1])
