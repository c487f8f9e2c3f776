"""The inputs of a denoise request: the model's weights, the prompts and the noise process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .declaration import Declaration

Value = bool | int | float | str | None
"""The type of a plain value in conditioning, besides tensors."""


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights that a worker loads. Two specs are equal exactly when they name the same weights.

    Attributes:
        family: the name of the model family.
        path: the model file.
        modified: the file's time of modification, in nanoseconds.
        size: bytes of the file.
        dtype: the dtype of weights that the file does not quantise.
        digest: the digest of the file's content (`weights/files/digest.py`), by which other machines find their copy.
        compute: the dtype that ComfyUI computes in and that quantised layers expand to.
        fast_fp8: plain fp8 weights are multiplied in fp8.
        derived: the derived declaration of a class of ComfyUI's for which no declaration is written.
        dynamic: ComfyUI's own loader would load the model dynamically (`models/comfyui/dynamic_loading.py`).
        text: the type and the further files of a text encoder; None for other models.
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
    text: TextEncoderFiles | None = None


class TextEncoderFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The type of a text encoder, and its files after the first.

    Attributes:
        kind: the type that the user has picked, as ComfyUI's loader names it.
        further: the other files, in the order of ComfyUI's loader.
    """

    kind: str
    further: tuple[ModelSpec, ...] = ()


class FlowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The settings of a MODEL's rectified-flow sampling (ComfyUI's CONST).

    Attributes:
        timestep_scale: the factor from sigma to the model's timestep.
        noise_scale: the factor of the noise.
    """

    timestep_scale: float
    noise_scale: float


class DiffusionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The settings of a MODEL's diffusion over a table of noise levels (ComfyUI's EPS and V_PREDICTION).

    The table is the request's tensor `log_sigmas`.

    Attributes:
        prediction: the quantity that the model predicts: the noise (eps) or the velocity (v).
    """

    prediction: Literal["eps", "v"]


Sampling = FlowSettings | DiffusionSettings
"""The MODEL's noise process."""


class ObjectRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object that a function holds: its class in ComfyUI as `module:name`, and the packed arguments of the class."""

    kind: str
    values: dict[str, Any] = {}


class FunctionRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The recipe by which a worker rebuilds a function that a node of ComfyUI's has put among a MODEL's options.

    All attributes but `module`, `function`, `defaults` and `by_head` hold variables of the function's closure, by name.

    Attributes:
        module: the function's module in ComfyUI, by its full name.
        function: the function's qualified name there. It contains `<locals>` if another function makes this function.
        values: plain values, packed (`models/comfyui/features/recipe.py`).
        functions: functions of ComfyUI's modules, as `module:name`.
        objects: objects of ComfyUI's classes. Functions of one request that name an object alike share it.
        blocks: blocks of the model, as their paths.
        inner: functions that were made by the same call as this one.
        defaults: the packed defaults of the function's arguments.
        by_head: the names of the values that are lists with one entry per head.
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
        """Return the name of the class or function that makes the function."""
        return self.function.partition(".")[0]


class CacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a step cache of ComfyUI's, which skips model calls (`denoise/step_cache.py`).

    Attributes:
        kind: the name of the cache in ComfyUI.
        threshold: the cache skips calls while the output has probably changed by less than this fraction of itself.
        start: the largest sigma of a skipped call.
        end: the cache skips calls only at sigmas above this one.
        stride: the cache compares every `stride`-th row and column.
    """

    kind: Literal["EasyCache", "LazyCache"]
    threshold: float
    start: float
    end: float
    stride: int


class PromptSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a CONDITIONING. It takes part in model calls with `end <= sigma <= start`.

    Attributes:
        tensors: the model's names of the tensors, mapped to the request's names.
        strength: the entry's weight in the average of the outputs of several entries.
        start: the largest sigma; None for no limit.
        end: the smallest sigma; None for no limit.
        values: the values that are not tensors, by the model's names.
    """

    tensors: dict[str, str]
    strength: float = 1.0
    start: float | None = None
    end: float | None = None
    values: dict[str, Value] = {}
