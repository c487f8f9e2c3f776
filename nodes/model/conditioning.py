"""Conditioning: the inputs that ComfyUI gives a model besides the latent, as tensors and values to send to workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import comfy.conds
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from torch import Tensor

from ...parallel_backend.conditioning import (
    BRANCHES,
    CONSTANTS,
    CROSS_ATTENTION,
    NAMES,
    OPTIONS,
    PREFIX_CACHE,
    SIGMAS,
    TOGETHER,
    Conditioning,
    flatten,
    in_dict,
)
from ...parallel_backend.diffusion import Value
from ...parallel_backend.models.comfyui.rows import rows_of, run_of

TEXT_MASK = "attention_mask"
"""The mask of the text's tokens that count. ComfyUI and its models use this name."""

KINDS = (comfy.conds.CONDRegular, comfy.conds.CONDNoiseShape, comfy.conds.CONDConstant, comfy.conds.CONDList)
"""Kinds of conditioning whose tensors ComfyUI repeats to the batch size, and does not change otherwise."""

RECOMPUTED = frozenset({"minimax_payload.layout"})
"""Objects in the conditioning that are not sent, because the model in a worker makes them itself."""

UNCAST = (torch.int32, torch.int64)
"""Dtypes that ComfyUI does not cast to the model's dtype (`convert_tensor`). It casts text and concatenated latents always."""

STRICT = "parallel_strict"
"""The transformer option of a MODEL that refuses runs that the workers' loop does not support."""

OWN_OPTIONS = frozenset({"prefetch_dynamic_vbars", STRICT, BRANCHES, "uuids"})
"""Plain transformer_options that belong to ComfyUI or to this pack. They are not sent with a prompt."""

NUMBERS = {"rope_options": "changed positions", "chroma_radiance_options": "Chroma Radiance options"}
"""Options that hold numbers by name: shifts of token positions (ScaleROPE, LongCatImage's class), ChromaRadianceOptions."""

DICT_OPTIONS = frozenset({PREFIX_CACHE})
"""Transformer options that are dicts of plain values."""

SAMPLING_KEYS = ("area", "mask", "default", "gligen", "hooks", "control")
"""Keys of a prompt that ComfyUI's samplers add to the output of the model class."""


class NotSupported(Exception):
    """A reason why the workers' loop cannot do a run, which then makes one forward of the model per request.

    `instead` is the choice that the message recommends to use the workers' loop.
    """

    def __init__(self, what: str, instead: str = "a graph without it") -> None:
        super().__init__(what)
        self.instead = instead


def by_mask(call: Conditioning) -> list[Conditioning]:
    """Split a call's batch between rows with different text masks, because the workers drop masked tokens.

    A tensor that applies to all rows goes with each part.
    """
    mask, batch = call.tensors.get(TEXT_MASK), call.tensors["x"].shape[0]
    if mask is None or mask.shape[0] != batch:  # one mask applies to all rows
        return [call]
    edges = [0, *(row for row in range(1, batch) if not torch.equal(mask[row], mask[row - 1])), batch]
    return [
        Conditioning(rows_of(call.tensors, call.values, run_of(slice(*part))), call.values) for part in pairwise(edges)
    ]


def of_prompt(model_conds: Mapping[str, Any], dtype: torch.dtype, batch: int) -> Conditioning:
    """Return the conditioning of one entry of a CONDITIONING, in the dtypes to which ComfyUI casts it.

    Args:
        model_conds: the output of ComfyUI's model class for the entry.
        dtype: the model's dtype.
        batch: the number of latents. If a tensor belongs to all of them, the workers compute them together.

    Raises:
        Refused: the conditioning cannot be sent.
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
    """Return True if the condition is one tensor for all rows of a batch, such as the voxels of all its shapes."""
    return isinstance(condition, comfy.conds.CONDConstant) and isinstance(condition.cond, Tensor)


def of_call(context: Tensor | None, inputs: Mapping[str, Any]) -> Conditioning:
    """Return the conditioning of one model call.

    Args:
        context: the text.
        inputs: the model's other inputs, without concatenated latents.

    Raises:
        Refused: the inputs cannot be sent.
    """
    conditioning = Conditioning({} if context is None else {"context": context})
    for name, value in inputs.items():
        if value is not None:
            flatten(name, _sent(name, value), conditioning.tensors, conditioning.values)
    return conditioning


def repeated_text(model: Any, prompts: Sequence[Mapping[str, Any]]) -> tuple[type, ...]:
    """Return the conditioning classes whose texts ComfyUI may repeat to the length of a longer text.

    A UNet only attends to the text: repeating changes only its rounding, and the workers run each length separately. A model
    that runs unsharded qualifies if ComfyUI repeats none of its texts.

    Args:
        model: ComfyUI's BaseModel.
        prompts: for each prompt, the output of ComfyUI's model class.
    """
    proxy, kinds = model.diffusion_model, (comfy.conds.CONDCrossAttn,)
    texts = [conds[CROSS_ATTENTION] for conds in prompts if CROSS_ATTENTION in conds]
    repeats = any(
        first.can_concat(second) and first.size() != second.size() for first, second in combinations(texts, 2)
    )
    return kinds if isinstance(proxy.skeleton, UNetModel) or (proxy.unsharded and not repeats) else ()


def check_prompt(entry: Mapping[str, Any], more_kinds: tuple[type, ...] = ()) -> None:
    """Raise NotSupported if the workers' loop would treat a prompt differently from ComfyUI's samplers.

    That is so for the keys that samplers add, and for kinds of conditioning that depend on the other prompts of a batch.

    Args:
        entry: the prompt.
        more_kinds: further kinds that the loop treats as ComfyUI does, for this model.
    """
    for key in SAMPLING_KEYS:
        if entry.get(key) is not None:
            raise NotSupported(f"{key} in the conditioning")
    for key, condition in entry["model_conds"].items():
        if type(condition) not in (*KINDS, *more_kinds):
            raise NotSupported(f"{key} in the conditioning")


def _sent(name: str, value: Any) -> Any:
    """Return a conditioning without the entries that the model makes itself."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None and f"{name}.{key}" not in RECOMPUTED} or None


def is_plain(option: Any) -> bool:
    """Return True if an option is a plain value, or a collection of plain values, which can be sent with a prompt."""
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
    """Return the sigmas of the call and of all steps, under their names in a call."""
    values: dict[str, Value] = {}
    for name in SIGMAS:
        flatten(f"{OPTIONS}.{name}", transformer_options[name].float().tolist(), {}, values)
    return values
