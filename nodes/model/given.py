"""What a model is given besides the latent: ComfyUI's conditioning as tensors and values that the workers take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import comfy.conds
import torch
from torch import Tensor

from ...parallel_backend.diffusion import Value
from ...parallel_backend.errors import Refused
from ...parallel_backend.models.comfyui.conditioning import OPTIONS, flatten, in_dict

CROSS_ATTENTION, CONCAT = "c_crossattn", "c_concat"
NAMES = {CROSS_ATTENTION: "context", CONCAT: "concat"}
"""ComfyUI's names of the conditioning of all models -> the model's own."""

TENSOR_NAMES = NAMES | {name: name for name in ("y", "guidance", "ofs", "attention_mask", "c_size", "c_ar")}
"""The same for the families over diffusers' modules, which take nothing else."""

TEXT_MASK = "attention_mask"
"""Which of the text's tokens count, in ComfyUI's names and in those of its models."""

PLAIN = (comfy.conds.CONDRegular, comfy.conds.CONDNoiseShape)
KINDS = (*PLAIN, comfy.conds.CONDConstant, comfy.conds.CONDList)
"""The kinds of conditioning whose tensors are repeated to the batch and not changed otherwise."""

PROMPT_KEYS = {"cross_attn", "pooled_output", "guidance", "model_conds", "uuid", "strength", "attention_mask"} | {
    "concat_latent_image", "concat_mask", "ofs", "width", "height", "aspect_ratio",
    "start_percent", "end_percent", "clip_start_percent", "clip_end_percent", "timestep_start", "timestep_end"
}  # fmt: skip
"""What a prompt may hold for those families. Other numbers and words do not reach them, other tensors and objects might."""

MADE_AGAIN = frozenset({"minimax_payload.layout"})
"""Objects in the conditioning that the model makes itself where they are not given."""

UNCAST = (torch.int32, torch.int64)
"""What ComfyUI does not cast to the model's dtype (`convert_tensor`), but for text and concatenated latents."""

STRICT = "parallel_strict"
"""The option that says that a MODEL refuses what the workers' loop does not support."""

OWN_OPTIONS = frozenset({"prefetch_dynamic_vbars", STRICT})
"""Plain transformer_options that are ComfyUI's or this pack's own."""

SAMPLING_KEYS = ("area", "mask", "default", "gligen", "hooks", "control")
"""What ComfyUI's samplers make of a prompt besides what its model class has made of it."""


WAY_OUT = "remove the node that adds it, or use Load Diffusion Model"


class NotSupported(Exception):
    """The workers' loop does not support this; it runs with one forward of the model per call instead.

    `instead` is what to choose for the workers' loop.
    """

    def __init__(self, what: str, instead: str = "a graph without it") -> None:
        super().__init__(what)
        self.instead = instead


@dataclass(frozen=True)
class Given:
    """Tensors and values by the model's own names; those of a whole call have `x` and `timestep` too."""

    tensors: dict[str, Tensor]
    values: dict[str, Value] = field(default_factory=dict)


def by_mask(call: Given) -> list[Given]:
    """A call, cut where the rows of its batch begin to have another mask of the text: the workers leave masked tokens out."""
    mask = call.tensors.get(TEXT_MASK)
    if mask is None:
        return [call]
    batch = mask.shape[0]
    edges = [0, *(row for row in range(1, batch) if not torch.equal(mask[row], mask[row - 1])), batch]
    return [
        Given({name: tensor[start:stop] for name, tensor in call.tensors.items()}, call.values)
        for start, stop in pairwise(edges)
    ]


class Translator(Protocol):
    """How a family's conditioning becomes what its model in the workers is given.

    `asked` are the methods of ComfyUI's model class that the workers call, so that a class may have its own.
    """

    @property
    def asked(self) -> frozenset[str]: ...

    def of_prompt(self, model_conds: Mapping[str, Any], dtype: torch.dtype) -> Given:
        """Of one entry of a CONDITIONING, in the dtype that the model computes in, to which ComfyUI casts it.

        Raises:
            Refused: this family cannot be given it.
        """

    def check(self, entry: Mapping[str, Any]) -> None:
        """Raise NotSupported for a prompt that the workers' loop would not treat as ComfyUI does."""

    def of_call(self, context: Tensor, inputs: Mapping[str, Any]) -> Given:
        """Of one model call, `inputs` being what it has besides text and concatenated latents. Raises Refused."""


class ByName:
    """For the families over diffusers' modules, whose conditioning is a list of names."""

    asked: frozenset[str] = frozenset()

    def of_prompt(self, model_conds: Mapping[str, Any], dtype: torch.dtype) -> Given:
        """By that list."""
        unknown = sorted(set(model_conds) - set(TENSOR_NAMES))
        if unknown:
            raise Refused(f"{', '.join(unknown)} in the conditioning is not supported by this MODEL: {WAY_OUT}.")
        return Given({TENSOR_NAMES[name]: value.cond.to(dtype) for name, value in model_conds.items()})

    def check(self, entry: Mapping[str, Any]) -> None:
        """All that is not known."""
        other = sorted(key for key in set(entry) - PROMPT_KEYS if entry[key] is not None)
        if other:
            raise NotSupported(f"{other[0]} in the conditioning")
        for key, condition in entry["model_conds"].items():
            if type(condition) not in PLAIN:
                raise NotSupported(f"{key} in the conditioning")

    def of_call(self, context: Tensor, inputs: Mapping[str, Any]) -> Given:
        """By that list."""
        given = {name: value for name, value in inputs.items() if value is not None}
        unknown = sorted(set(given) - set(TENSOR_NAMES))
        if unknown:
            raise Refused(f"{', '.join(unknown)} is not supported by this MODEL: {WAY_OUT}.")
        return Given({"context": context, **given})


class AsItIs:
    """For ComfyUI's own models: whatever its model class makes of the conditioning."""

    asked: frozenset[str] = frozenset({"process_timestep"})

    def of_prompt(self, model_conds: Mapping[str, Any], dtype: torch.dtype) -> Given:
        """All of it."""
        given = Given({})
        for name, condition in model_conds.items():
            flatten(NAMES.get(name, name), _sent(name, condition.cond), given.tensors, given.values)
        for name, tensor in given.tensors.items():
            untouched = (tensor.dtype in UNCAST and name not in NAMES.values()) or in_dict(name, given.values)
            given.tensors[name] = tensor if untouched else tensor.to(dtype)
        return given

    def check(self, entry: Mapping[str, Any]) -> None:
        """What samplers make of a prompt, and kinds of conditioning that change with what they are batched with."""
        for key in SAMPLING_KEYS:
            if entry.get(key) is not None:
                raise NotSupported(f"{key} in the conditioning")
        for key, condition in entry["model_conds"].items():
            if type(condition) not in KINDS:
                raise NotSupported(f"{key} in the conditioning")

    def of_call(self, context: Tensor, inputs: Mapping[str, Any]) -> Given:
        """All of it."""
        given = Given({"context": context})
        for name, value in inputs.items():
            if value is not None:
                flatten(name, _sent(name, value), given.tensors, given.values)
        return given


def _sent(name: str, value: Any) -> Any:
    """A conditioning less what the model makes again."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None and f"{name}.{key}" not in MADE_AGAIN} or None


def options_of(transformer_options: Mapping[str, Any]) -> dict[str, Value]:
    """The plain values that a node has put among them, under the names by which they go with a prompt."""
    return {
        f"{OPTIONS}.{name}": value
        for name, value in transformer_options.items()
        if isinstance(value, (bool, int, float, str)) and name not in OWN_OPTIONS
    }
