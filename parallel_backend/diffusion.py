"""What a denoise is of: the model's weights, its prompts, and its noise process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .declaration import Declaration

Value = bool | int | float | str | None
"""What conditioning may hold besides tensors."""


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which weights to hold: enough for a worker to load them, and equal exactly when they are the same weights.

    `dtype` is what weights are held in that the file does not quantise, `compute` the type that ComfyUI computes in and quantised
    layers expand to; with `fast_fp8` plain fp8 weights are multiplied in fp8. `digest` is the file's content
    (`weights/files/digest.py`), which tells other machines their copy. `derived` says how a model of ComfyUI's is spread for
    whose class no declaration is written. `dynamic` is True where ComfyUI's own loader would load the model dynamically
    (`models/comfyui/dynamic_loading.py`).
    """

    family: str
    path: str
    modified: int
    size: int
    dtype: str
    digest: str = ""
    compute: str = "float32"
    fast_fp8: bool = False
    derived: Declaration | None = None
    dynamic: bool = False


class FlowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The MODEL's rectified-flow sampling (ComfyUI's CONST), as plain numbers.

    `timestep_scale` turns sigma into the model's timestep; `noise_scale` multiplies noise.
    """

    timestep_scale: float
    noise_scale: float


class DiffusionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The MODEL's diffusion over a table of noise levels (ComfyUI's EPS and V_PREDICTION).

    `prediction` is what the model predicts. The table is the request's tensor `log_sigmas`.
    """

    prediction: Literal["eps", "v"]


Sampling = FlowSettings | DiffusionSettings
"""The MODEL's noise process."""


class ObjectRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object that a function holds: its class in ComfyUI as `module:name`, and the packed arguments of the class."""

    kind: str
    values: dict[str, Any] = {}


class FunctionRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker needs to rebuild a function that a node of ComfyUI's has put among a MODEL's options.

    All but `module`, `function` and `defaults` are variables of the function's closure, by name.

    Attributes:
        module: the function's module in ComfyUI, by its full name.
        function: the function's qualified name there; `<locals>` is in the name of a function that another one makes.
        values: plain values, packed (`models/comfyui/features/recipe.py`).
        functions: functions of ComfyUI's modules, as `module:name`.
        objects: objects of ComfyUI's classes; the functions of one request that name an object alike share it.
        blocks: blocks of the model, as their paths.
        inner: functions that were made by the same call as this one.
        defaults: the packed defaults of the function's arguments.
        by_head: the names of lists among the values that have an entry for each head.
    """

    module: str
    function: str
    values: dict[str, Any] = {}
    functions: dict[str, str] = {}
    objects: dict[str, ObjectRecipe] = {}
    blocks: dict[str, str] = {}
    inner: dict[str, FunctionRecipe] = {}
    defaults: Any = None
    by_head: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """The name of the class or function that makes the function."""
        return self.function.partition(".")[0]


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step cache of ComfyUI's (`denoise/step_cache.py`), which skips model calls at sigmas above `end` and not above `start`.

    It skips while the output has probably changed by less than `threshold` of itself, judged by every `stride`-th row and
    column.
    """

    kind: Literal["EasyCache", "LazyCache"]
    threshold: float
    start: float
    end: float
    stride: int


class PromptSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a CONDITIONING: `tensors` maps the model's names to the request's tensors, `values` what is no tensor.

    It takes part while `end <= sigma <= start`; outputs of several entries are averaged by `strength`.
    """

    tensors: dict[str, str]
    strength: float = 1.0
    start: float | None = None
    end: float | None = None
    values: dict[str, Value] = {}
