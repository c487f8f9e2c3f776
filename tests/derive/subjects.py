"""Subjects of derivations: the tests' small models, and ComfyUI's classes without a written declaration, at any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from parallel_backend.derive.calls import ModelCall, Sizes, Subject
from parallel_backend.models.comfyui.small import SMALL, SOUND, Case, small
from parallel_backend.models.comfyui.small.case import HEADS, TEXT, WIDTH, Builder
from tests.support.classes import lacking
from tests.support.tiny.models import draw, randomise


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


def _declared(name: str) -> Subject:
    return subject_of(small(name))


def _undeclared(
    name: str,
    channels: int,
    sizes: Sizes,
    inputs: Callable[[int], Mapping[str, Any]] = lambda tokens: {},
    **configuration: Any,
) -> Subject:
    """Return one of ComfyUI's classes with random weights. `inputs` gives its inputs besides a text of some tokens."""

    def call(size: Sizes) -> ModelCall:
        latent = draw(1, channels, *size.picture, seed=1)
        arguments = {"context": draw(1, size.text, TEXT, seed=2), **inputs(size.text)}
        return ModelCall(latent, torch.tensor([0.6]), arguments)

    return Subject(randomise(Builder().model(name, **configuration), seed=5), call, sizes)


def _second_text(tokens: int) -> Mapping[str, Tensor]:
    """Return HunyuanDiT's inputs. The second encoder's text is one token longer."""
    return {
        "encoder_hidden_states_t5": draw(1, tokens + 1, 64, seed=3),
        "text_embedding_mask": torch.ones(1, tokens),
        "text_embedding_mask_t5": torch.ones(1, tokens + 1),
    }


SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    **{name: partial(_declared, name) for name in SMALL if name not in {*SOUND, *lacking()}},
    "hunyuan-dit": partial(  # its later blocks take the output of earlier ones
        _undeclared, "hydit.models.HunYuanDiT", 4, Sizes((10, 14), 7), _second_text,
        hidden_size=WIDTH, depth=4, num_heads=HEADS, text_states_dim=TEXT, text_states_dim_t5=64, text_len=4, text_len_t5=6,
    ),
    "cogvideox": partial(
        _undeclared, "cogvideo.model.CogVideoXTransformer3DModel", 16, Sizes((3, 8, 10), 7),
        num_attention_heads=HEADS, attention_head_dim=64, time_embed_dim=64, text_embed_dim=TEXT, num_layers=3,
        use_rotary_positional_embeddings=True,
    ),
    "pixart": partial(
        _undeclared, "pixart.pixartms.PixArtMS", 4, Sizes((36, 40), 7),
        hidden_size=WIDTH, depth=3, num_heads=HEADS, caption_channels=TEXT, micro_condition=False, pe_interpolation=1,
    ),
    "causal wan": partial(
        _undeclared, "wan.ar_model.CausalWanModel", 16, Sizes((3, 7, 10), 7),
        dim=WIDTH, ffn_dim=256, text_dim=TEXT, num_heads=HEADS, num_layers=3,
    ),
}  # fmt: skip
"""All small models but those whose latent is packed with sound, and the classes without a written declaration."""
