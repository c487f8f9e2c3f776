"""What a model is given besides the latent: ComfyUI's conditioning as tensors and values that the workers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import comfy.conds
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor

from ...parallel_backend.conditioning import (
    CONSTANTS,
    CROSS_ATTENTION,
    NAMES,
    OPTIONS,
    PREFIX_CACHE,
    SIDES,
    SIGMAS,
    TOGETHER,
    Conditioning,
    flatten,
    in_dict,
)
from ...parallel_backend.diffusion import Value
from ...parallel_backend.models.comfyui.rows import rows_of, run_of

TEXT_MASK = "attention_mask"
"""Which of the text's tokens count, in ComfyUI's names and in those of its models."""

KINDS = (comfy.conds.CONDRegular, comfy.conds.CONDNoiseShape, comfy.conds.CONDConstant, comfy.conds.CONDList)
"""The kinds of conditioning whose tensors are repeated to the batch and not changed otherwise."""

MADE_AGAIN = frozenset({"minimax_payload.layout"})
"""Objects in the conditioning that the model makes itself where they are not given."""

UNCAST = (torch.int32, torch.int64)
"""What ComfyUI does not cast to the model's dtype (`convert_tensor`), but for text and concatenated latents."""

STRICT = "parallel_strict"
"""The option that says that a MODEL refuses what the workers' loop does not support."""

OWN_OPTIONS = frozenset({"prefetch_dynamic_vbars", STRICT, SIDES, "uuids"})
"""Plain transformer_options that are ComfyUI's or this pack's own."""

NUMBERS = {"rope_options": "changed positions", "chroma_radiance_options": "Chroma Radiance options"}
"""The options that hold numbers by name: how far tokens are moved (ScaleROPE, LongCatImage's class), ChromaRadianceOptions."""

DICT_OPTIONS = frozenset({PREFIX_CACHE})
"""Transformer options that are dicts of plain values."""

SAMPLING_KEYS = ("area", "mask", "default", "gligen", "hooks", "control")
"""What ComfyUI's samplers make of a prompt besides what its model class has made of it."""


class NotSupported(Exception):
    """The workers' loop does not support this; it runs with one forward of the model per call instead.

    `instead` is what to choose for the workers' loop.
    """

    def __init__(self, what: str, instead: str = "a graph without it") -> None:
        super().__init__(what)
        self.instead = instead


def by_mask(call: Conditioning) -> list[Conditioning]:
    """Cut a call where the rows of its batch begin to have another mask of the text: the workers leave masked tokens out.

    Tensors that are for all rows go with each part.
    """
    mask, batch = call.tensors.get(TEXT_MASK), call.tensors["x"].shape[0]
    if mask is None or mask.shape[0] != batch:  # one mask is for all rows
        return [call]
    edges = [0, *(row for row in range(1, batch) if not torch.equal(mask[row], mask[row - 1])), batch]
    return [
        Conditioning(rows_of(call.tensors, call.values, run_of(slice(*part))), call.values) for part in pairwise(edges)
    ]


def of_prompt(model_conds: Mapping[str, Any], dtype: torch.dtype, batch: int) -> Conditioning:
    """Of one entry of a CONDITIONING whatever ComfyUI's model class has made of it, in the dtype to which ComfyUI casts it.

    Args:
        batch: of the latents; where a tensor belongs to all of them, they are computed together.

    Raises:
        Refused: it cannot be sent.
    """
    conditioning = Conditioning({})
    for name, condition in model_conds.items():
        cond = condition.cond
        if is_constant_tensor(condition):
            conditioning.values[TOGETHER] = batch
            conditioning.tensors[f"{CONSTANTS}.{name}"] = cond if cond.dtype in UNCAST else cond.to(dtype)
        else:
            flatten(NAMES.get(name, name), _sent(name, cond), conditioning.tensors, conditioning.values)
    for name, tensor in conditioning.tensors.items():
        untouched = (tensor.dtype in UNCAST and name not in NAMES.values()) or in_dict(name, conditioning.values)
        conditioning.tensors[name] = tensor if untouched else tensor.to(dtype)
    return conditioning


def is_constant_tensor(condition: Any) -> bool:
    """Whether it is one tensor for all rows of a batch, such as the voxels of all its shapes."""
    return isinstance(condition, comfy.conds.CONDConstant) and isinstance(condition.cond, Tensor)


def of_call(context: Tensor | None, inputs: Mapping[str, Any]) -> Conditioning:
    """Of one model call, `inputs` being what it has besides text and concatenated latents.

    Raises:
        Refused: it cannot be sent.
    """
    conditioning = Conditioning({} if context is None else {"context": context})
    for name, value in inputs.items():
        if value is not None:
            flatten(name, _sent(name, value), conditioning.tensors, conditioning.values)
    return conditioning


def repeated_text(model: Any, prompts: Sequence[Mapping[str, Any]]) -> tuple[type, ...]:
    """Return the conditioning classes whose texts ComfyUI may repeat to the length of a longer text.

    A UNet only attends to the text: repeating changes only its rounding, and the workers run each length separately. A
    model that runs unsharded qualifies if ComfyUI repeats none of its texts.

    Args:
        prompts: what ComfyUI's class has made of each.
    """
    proxy, kinds = model.diffusion_model, (comfy.conds.CONDCrossAttn,)
    texts = [conds[CROSS_ATTENTION] for conds in prompts if CROSS_ATTENTION in conds]
    repeats = any(
        first.can_concat(second) and first.size() != second.size() for first, second in combinations(texts, 2)
    )
    return kinds if isinstance(proxy.skeleton, UNetModel) or (proxy.unsharded and not repeats) else ()


def check_prompt(entry: Mapping[str, Any], more_kinds: tuple[type, ...] = ()) -> None:
    """Raise NotSupported for what samplers make of a prompt, and for kinds of conditioning that change with what they are
    batched with: the workers' loop would not treat them as ComfyUI does.

    Args:
        more_kinds: those that it does treat so for this model.
    """
    for key in SAMPLING_KEYS:
        if entry.get(key) is not None:
            raise NotSupported(f"{key} in the conditioning")
    for key, condition in entry["model_conds"].items():
        if type(condition) not in (*KINDS, *more_kinds):
            raise NotSupported(f"{key} in the conditioning")


def _sent(name: str, value: Any) -> Any:
    """A conditioning less what the model makes again."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None and f"{name}.{key}" not in MADE_AGAIN} or None


def is_plain(option: Any) -> bool:
    """Whether an option is a plain value, or a collection of such, which goes with a prompt."""
    if isinstance(option, (list, tuple, set, frozenset)):
        return all(is_plain(item) for item in option)
    return option is None or isinstance(option, (bool, int, float, str))


def is_plain_dict_option(name: str, option: Any) -> bool:
    """Return True if the transformer option `name` may be a dict, and all values of the dict are plain."""
    return name in DICT_OPTIONS and isinstance(option, Mapping) and all(is_plain(value) for value in option.values())


def options_of(transformer_options: Mapping[str, Any]) -> dict[str, Value]:
    """Return the transformer options that nodes have set and that workers take, flattened under their names in a prompt."""
    values: dict[str, Value] = {}
    for name, value in transformer_options.items():
        if is_plain(value) and name not in OWN_OPTIONS:
            flatten(f"{OPTIONS}.{name}", value, {}, values)
    named = {option: transformer_options.get(option) or {} for option in NUMBERS}
    named |= {option: value for option, value in transformer_options.items() if is_plain_dict_option(option, value)}
    return values | {
        f"{OPTIONS}.{option}.{name}": value for option, numbers in named.items() for name, value in numbers.items()
    }


def sigmas_of(transformer_options: Mapping[str, Any]) -> dict[str, Value]:
    """Those of the call and of all steps, under the names that they have in a call."""
    values: dict[str, Value] = {}
    for name in SIGMAS:
        flatten(f"{OPTIONS}.{name}", transformer_options[name].float().tolist(), {}, values)
    return values
