"""Functions that ComfyUI's own nodes put in attention's place (ModelAttentionBackend): the workers make them again.

A function is sent as a recipe: its module and name, plain values, functions of ComfyUI's by their names, and objects of its
classes by what they were made with. It must treat each head for itself, and keep nothing from call to call, which is tried here:
ranks have some of the heads each, and make the objects anew for each model call.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import CodeType
from typing import Any

import comfy.ldm.modules.attention
import torch
from comfy.model_management import get_torch_device
from torch import Tensor

from ....parallel_backend.conditioning import ATTENTION_OVERRIDE, OPTIONS, SIDES, flatten
from ....parallel_backend.diffusion import Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.features.attention_override import ObjectRecipe, OverrideRecipe, named
from ....parallel_backend.models.comfyui.features.guidance import codes_of
from ....parallel_backend.plan import ModelShape, ParallelPlan
from ..conditioning import is_plain
from ..own_code import COMFYUI, name_of
from ..trials import equal, isolated, random

OPTION = "optimized_attention_override"
"""The option in which nodes put such a function."""

PACKAGES = "comfy", "comfy_extras"

ABSENT = {"nodes", "server", "execution"}
"""Modules of ComfyUI's that workers have not."""

UNSENT = {SIDES, "uuids", "callbacks", "wrappers"}
"""ComfyUI's options that workers are not told."""

TOKENS, ROWS = 65, 2
"""Of what a function is tried with."""

TOLERANCES = {torch.float32: 1e-5}
ROUGH = 1e-2
"""What heads apart may be off from all heads at once, relative; in types that round more."""


def recipe_of(function: Any) -> OverrideRecipe | None:
    """Return the recipe by which the workers rebuild a function, or None.

    The function must be ComfyUI's own, and hold only plain values, ComfyUI functions and unchanged objects of ComfyUI's
    classes.
    """
    if not is_importable(function):
        return None
    if (whole := place_of(function)) is not None:
        of_module, _, name = whole.partition(":")
        return OverrideRecipe(of_module, name, {}, {}, {}, (), ())
    module = _module_of(function)
    if module is None or function.__kwdefaults__ or not is_plain(function.__defaults__):
        return None
    holds = {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    values = {name: value for name, value in holds.items() if is_plain(value)}
    functions = {name: path for name, value in holds.items() if (path := place_of(value)) is not None}
    objects = {
        name: recipe
        for name, value in holds.items()
        if name not in values and (recipe := object_recipe(value, function)) is not None
    }
    if function.__code__ not in codes_of(sys.modules[function.__module__], function.__qualname__):
        return None
    if len(values) + len(functions) + len(objects) < len(holds):
        return None
    return OverrideRecipe(module, function.__qualname__, values, functions, objects, function.__defaults__ or (), ())


def refuse_split(function: Any, requested_plan: ParallelPlan, what: str = "an attention override") -> None:
    """Raise Refused where a plan asks for what an override, or `what` else attends, cannot be used with."""
    degrees = {"ring": requested_plan.ring, "pipefusion": requested_plan.pipefusion, "patches": requested_plan.patches}
    if names := [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]:
        raise Refused(
            f"{what} ({name_of(function)}) sees all tokens of some heads, which it cannot with "
            f"{' and '.join(names)}: set {' and '.join(name for name, degree in degrees.items() if degree > 1)} to 0 or 1 in "
            "Parallel Plan, or remove the node that adds it."
        )


def values_of(recipe: OverrideRecipe) -> dict[str, Value]:
    """Return a recipe as values that go with a call."""
    prefix, values = f"{OPTIONS}.{ATTENTION_OVERRIDE}", dict[str, Value]()
    flatten(prefix, filled(replace(recipe, objects={})), {}, values)
    for name, recipe_of_object in recipe.objects.items():
        flatten(f"{prefix}.objects.{name}", filled(recipe_of_object), {}, values)
    return values


def filled(recipe: OverrideRecipe | ObjectRecipe) -> dict[str, Any]:
    """The fields of a recipe that are not empty: only these can travel."""
    return {field.name: value for field in fields(recipe) if (value := getattr(recipe, field.name))}


def tried(recipe: OverrideRecipe, shape: ModelShape, dtype: torch.dtype) -> OverrideRecipe:
    """Return the recipe with the names of its per-head values. Compare its results for some heads and for all heads.

    Raises:
        Refused: it gives something else for some heads than for all, keeps something, or reads what workers are not told; or it
            cannot be tried.
    """
    lists = tuple(
        name for name, value in recipe.values.items() if isinstance(value, list | tuple) and len(value) == shape.heads
    )
    reason = "it gives something else for some of the heads than for all of them at once"
    for by_head in dict.fromkeys((lists, ())):
        objects = recipe.made()
        candidate = replace(recipe, by_head=by_head)
        try:
            with isolated():
                whole, parts = _answers(candidate, objects, shape, dtype)
        except Exception as error:  # whatever another's code comes to
            reason = f"it cannot be tried ({type(error).__name__}: {error})"
            continue
        if changed := [
            f"{type(instance).__name__}.{field}"
            for name, instance in objects.items()
            for field in _changed_attributes(instance, recipe, name)
        ]:
            reason = f"it keeps something from call to call ({', '.join(changed)})"
            continue
        if unsent := sorted(UNSENT & {*_strings_in_code(recipe)}):
            reason = f"it reads {' and '.join(unsent)}, which the workers are not told"
            continue
        if equal(parts, whole, TOLERANCES.get(dtype, ROUGH)):
            return candidate
    raise Refused(
        f"an attention override ({recipe.module}.{recipe.function}) cannot be applied to a parallel MODEL, because {reason}: "
        "remove that node, or use Load Diffusion Model."
    )


def _strings_in_code(recipe: OverrideRecipe) -> Iterator[str]:
    """Yield the strings in the code of a function, of the functions that it calls and of its objects' classes."""
    function = recipe.of_heads(slice(None), recipe.made())
    functions = [function, *(named(path) for path in recipe.functions.values())]
    functions += [value for entry in recipe.objects.values() for value in vars(named(entry.place)).values()]
    codes = [value.__code__ for value in functions if inspect.isfunction(value)]
    while codes:
        constants = codes.pop().co_consts
        yield from (value for value in constants if isinstance(value, str))
        codes += [value for value in constants if isinstance(value, CodeType)]


def _answers(
    recipe: OverrideRecipe, objects: Mapping[str, Any], shape: ModelShape, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of random operands all heads at once, and some and the others."""
    heads, device = shape.heads, get_torch_device()
    size = ROWS, heads, TOKENS, shape.head_dim
    q, k, v = (random(seed, size).to(device, dtype) for seed in range(3))
    kernel = inspect.unwrap(comfy.ldm.modules.attention.optimized_attention)

    def answer(run: slice) -> Tensor:
        own = (x[:, run].contiguous() for x in (q, k, v))
        count = len(range(heads)[run])
        out: Tensor = recipe.of_heads(run, objects)(
            kernel, *own, count, mask=None, attn_precision=None, skip_reshape=True, skip_output_reshape=True,
            transformer_options={"block_index": 0}, _inside_attn_wrapper=True,
        )  # fmt: skip
        return out.float()

    some = -(-heads // 3)
    parts = [answer(run) for run in (slice(0, some), slice(some, heads)) if range(heads)[run]]
    return answer(slice(0, heads)), torch.cat(parts, dim=1)


def _module_of(function: Any) -> str | None:
    """The full name of a function's module; None unless that is ComfyUI's, and the function's own."""
    if not inspect.isfunction(function):
        return None
    module = sys.modules.get(function.__module__)
    file = Path(getattr(module, "__file__", None) or "")
    if function.__globals__ is not vars(module) or not file.is_relative_to(COMFYUI):
        return None
    parts = file.relative_to(COMFYUI).with_suffix("").parts
    return ".".join(parts) if parts[0] in PACKAGES else None


def is_importable(function: Any) -> bool:
    """Whether workers can import a function's module: there `nodes` is this pack's, and nothing serves pages."""
    if _module_of(function) is None:
        return False
    tree = ast.parse(inspect.getsource(sys.modules[function.__module__]))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return not {name.partition(".")[0] for name in names} & ABSENT


def place_of(function: Any) -> str | None:
    """`module:name` of a function that lies in a module of ComfyUI's; None for anything else."""
    module = _module_of(function)
    if module is None or function.__globals__.get(function.__qualname__) is not function:
        return None
    return f"{module}:{function.__qualname__}"


def object_recipe(instance: Any, function: Any) -> ObjectRecipe | None:
    """Return the recipe that rebuilds an object of a ComfyUI class. Return None if the class would make a different
    object.

    A class is asked for the arguments that its objects have under the same names. Besides these an object may remember the
    functions themselves that were put in attention's place.
    """
    path = _path_of_class(type(instance))
    if path is None:
        return None
    arguments = [name for name in inspect.signature(type(instance)).parameters if name in vars(instance)]
    values = {name: vars(instance)[name] for name in arguments}
    if not is_plain([*values.values()]):
        return None
    try:
        new = vars(type(instance)(**values))
    except Exception:  # whatever its class has against them
        return None
    remaining = {
        name
        for name in {*new, *vars(instance)}
        if name not in arguments and not _remembers(vars(instance).get(name), function)
    }
    unchanged = all(name in new and _same(new[name], vars(instance).get(name)) for name in (*arguments, *remaining))
    return ObjectRecipe(path, values) if unchanged else None


def _remembers(value: Any, function: Any) -> bool:
    """Return True if a value is a set or list that holds only the function, or functions of the same code."""
    return isinstance(value, (set, list)) and {getattr(member, "__code__", None) for member in value} == {
        function.__code__
    }


def _changed_attributes(instance: Any, recipe: OverrideRecipe, name: str) -> list[str]:
    """Return the attributes in which an object differs from a new object of its recipe."""
    new = vars(recipe.objects[name].make())
    return sorted(field for field, value in vars(instance).items() if field not in new or not _same(new[field], value))


def _same(first: Any, second: Any) -> bool:
    """Return True if two values can be compared and are equal."""
    try:
        return bool(first == second)
    except Exception:  # tensors of several values, and what else has no answer
        return False


def _path_of_class(kind: type) -> str | None:
    """Return `module:name` of a class in a ComfyUI module that workers can import; None for other classes."""
    methods = [value for value in vars(kind).values() if inspect.isfunction(value)]
    if kind.__bases__ != (object,) or not methods or not all(is_importable(method) for method in methods):
        return None
    path = f"{_module_of(methods[0])}:{kind.__qualname__}"
    module = sys.modules[kind.__module__]
    return path if vars(module).get(kind.__qualname__) is kind else None
