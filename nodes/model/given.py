"""What a model is given besides the latent: ComfyUI's conditioning as tensors and values that the workers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import comfy.conds
import torch
from torch import Tensor

from ...parallel_backend.errors import Refused
from ...parallel_backend.models.comfyui.conditioning import flatten
from ...parallel_backend.models.flux import REFERENCE_METHODS, reference_tokens
from ...parallel_backend.models.inputs import Value

CROSS_ATTENTION, CONCAT = "c_crossattn", "c_concat"
NAMES = {CROSS_ATTENTION: "context", CONCAT: "concat"}
"""ComfyUI's names of the conditioning of all models -> the model's own."""

TENSOR_NAMES = NAMES | {name: name for name in ("y", "guidance", "ofs", "attention_mask", "c_size", "c_ar")}
"""The same for the families over diffusers' modules, which take nothing else."""

REFERENCES = ("ref_latents", "ref_latents_method")
"""ComfyUI's names of what becomes FLUX's reference tokens."""

PLAIN = (comfy.conds.CONDRegular, comfy.conds.CONDNoiseShape)
KINDS = (*PLAIN, comfy.conds.CONDConstant, comfy.conds.CONDList)
"""The kinds of conditioning whose tensors are repeated to the batch and not changed otherwise."""

PROMPT_KEYS = {"cross_attn", "pooled_output", "guidance", "model_conds", "uuid", "strength", "attention_mask"} | {
    "concat_latent_image", "concat_mask", "ofs", "width", "height", "aspect_ratio",
    "reference_latents", "reference_latents_method",
    "start_percent", "end_percent", "clip_start_percent", "clip_end_percent", "timestep_start", "timestep_end"
}  # fmt: skip
"""What a prompt may hold for those families. Other numbers and words do not reach them, other tensors and objects might."""

UNCAST = (torch.int32, torch.int64)
"""What ComfyUI does not cast to the model's dtype (`convert_tensor`)."""

SAMPLING_KEYS = ("area", "mask", "gligen", "hooks", "control")
"""What ComfyUI's samplers make of a prompt besides what its model class has made of it."""


class NotCarried(Exception):
    """The workers' loop does not carry this; it runs with one forward of the model per call instead."""


@dataclass(frozen=True)
class Given:
    """Tensors and values by the model's own names; those of a whole call have `x` and `timestep` too."""

    tensors: dict[str, Tensor]
    values: dict[str, Value] = field(default_factory=dict)


class Translator(Protocol):
    """How a family's conditioning becomes what its model in the workers is given.

    `called_by_workers` names the methods of ComfyUI's model class that the workers call as they are.
    """

    called_by_workers: tuple[str, ...]

    def of_prompt(self, model_conds: Mapping[str, Any], latent_shape: Sequence[int], dtype: torch.dtype) -> Given:
        """Of one entry of a CONDITIONING, in the dtype that the model computes in, to which ComfyUI casts it.

        Raises:
            Refused: this family cannot be given it.
        """

    def check(self, entry: Mapping[str, Any]) -> None:
        """Raise NotCarried for a prompt that the workers' loop would not treat as ComfyUI does."""

    def of_call(self, context: Tensor, inputs: Mapping[str, Any], latent_shape: Sequence[int]) -> Given:
        """Of one model call, `inputs` being what it has besides text and concatenated latents. Raises Refused."""


class ByName:
    """For the families over diffusers' modules, whose conditioning is a list of names."""

    called_by_workers: tuple[str, ...] = ()

    def of_prompt(self, model_conds: Mapping[str, Any], latent_shape: Sequence[int], dtype: torch.dtype) -> Given:
        """By that list."""
        unknown = sorted(set(model_conds) - {*TENSOR_NAMES, *REFERENCES})
        if unknown:
            raise Refused(f"{', '.join(unknown)} in the conditioning is not supported by this MODEL yet: remove it.")
        tensors = {
            TENSOR_NAMES[name]: value.cond.to(dtype) for name, value in model_conds.items() if name not in REFERENCES
        }
        references = {name: model_conds[name].cond for name in REFERENCES if name in model_conds}
        if latents := references.get(REFERENCES[0]):
            references[REFERENCES[0]] = [latent.to(dtype) for latent in latents]
        return Given(tensors | _references(references, latent_shape))

    def check(self, entry: Mapping[str, Any]) -> None:
        """All that is not known."""
        other = sorted(key for key in set(entry) - PROMPT_KEYS if entry[key] is not None)
        if other:
            raise NotCarried(f"{other[0]} in the conditioning")
        for key, condition in entry["model_conds"].items():
            if type(condition) not in PLAIN and key not in REFERENCES:
                raise NotCarried(f"{key} in the conditioning")

    def of_call(self, context: Tensor, inputs: Mapping[str, Any], latent_shape: Sequence[int]) -> Given:
        """By that list."""
        given = {name: value for name, value in inputs.items() if value is not None and name not in REFERENCES}
        unknown = sorted(set(given) - set(TENSOR_NAMES))
        if unknown:
            raise Refused(f"{', '.join(unknown)} is not supported by this MODEL yet: remove the node that adds it.")
        return Given({"context": context, **given} | _references(inputs, latent_shape))


def _references(inputs: Mapping[str, Any], latent_shape: Sequence[int]) -> dict[str, Tensor]:
    latents, method = (inputs.get(name) for name in REFERENCES)
    return {} if latents is None else reference_tokens(latents, method or REFERENCE_METHODS[0], latent_shape)


class AsItIs:
    """For ComfyUI's own models: whatever its model class makes of the conditioning."""

    called_by_workers: tuple[str, ...] = ("process_timestep",)

    def of_prompt(self, model_conds: Mapping[str, Any], latent_shape: Sequence[int], dtype: torch.dtype) -> Given:
        """All of it."""
        given = Given({})
        for name, condition in model_conds.items():
            flatten(NAMES.get(name, name), condition.cond, given.tensors, given.values)
        for name, tensor in given.tensors.items():
            given.tensors[name] = tensor if tensor.dtype in UNCAST else tensor.to(dtype)
        return given

    def check(self, entry: Mapping[str, Any]) -> None:
        """What samplers make of a prompt, and kinds of conditioning that change with what they are batched with."""
        for key in SAMPLING_KEYS:
            if entry.get(key) is not None:
                raise NotCarried(f"{key} in the conditioning")
        for key, condition in entry["model_conds"].items():
            if type(condition) not in KINDS:
                raise NotCarried(f"{key} in the conditioning")

    def of_call(self, context: Tensor, inputs: Mapping[str, Any], latent_shape: Sequence[int]) -> Given:
        """All of it."""
        given = Given({"context": context})
        for name, value in inputs.items():
            if value is not None:
                flatten(name, value, given.tensors, given.values)
        return given
