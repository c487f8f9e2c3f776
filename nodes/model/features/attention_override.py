"""Functions that ComfyUI's own nodes put in attention's place (ModelAttentionBackend): the workers make them again.

A function is sent as a recipe: its module and name, plain values, and functions of ComfyUI's by their names. It must treat
each head for itself, which is tried here, because ranks have some of the heads each.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import CodeType
from typing import Any

import comfy.ldm.modules.attention
import torch
from comfy.model_management import get_torch_device
from torch import Tensor

from ....parallel_backend.conditioning import ATTENTION_OVERRIDE, OPTIONS, flatten
from ....parallel_backend.diffusion import Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.features.attention_override import OverrideRecipe
from ....parallel_backend.plan import ModelShape, ParallelPlan
from ..conditioning import is_plain
from ..own_code import COMFYUI, name_of

OPTION = "optimized_attention_override"
"""The option in which nodes put such a function."""

PACKAGES = "comfy", "comfy_extras"

ABSENT = {"nodes", "server", "execution"}
"""Modules of ComfyUI's that workers have not."""

TOKENS, ROWS = 65, 2
"""Of what a function is tried with."""

TOLERANCES = {torch.float32: 1e-5}
ROUGH = 1e-2
"""What heads apart may be off from all heads at once, relative; in types that round more."""


def recipe_of(function: Any) -> OverrideRecipe | None:
    """What the workers make the function again by; None unless it is ComfyUI's own, and holds nothing but plain values and
    functions of ComfyUI's."""
    if not _is_importable(function):
        return None
    if (whole := _place(function)) is not None:
        of_module, _, name = whole.partition(":")
        return OverrideRecipe(of_module, name, {}, {}, (), ())
    module = _module_of(function)
    if module is None or function.__kwdefaults__ or not is_plain(function.__defaults__):
        return None
    holds = {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }
    values = {name: value for name, value in holds.items() if is_plain(value)}
    functions = {name: place for name, value in holds.items() if (place := _place(value)) is not None}
    if function.__code__ not in _made_by(function) or len(values) + len(functions) < len(holds):
        return None
    return OverrideRecipe(module, function.__qualname__, values, functions, function.__defaults__ or (), ())


def refuse_split(function: Any, wish: ParallelPlan) -> None:
    """Raise Refused where a plan asks for what an override cannot be used with."""
    asked = {"ring": wish.ring, "pipefusion": wish.pipefusion, "patches": wish.patches}
    if names := [f"{name} {degree}" for name, degree in asked.items() if degree > 1]:
        raise Refused(
            f"an attention override ({name_of(function)}) sees all tokens of some heads, which it cannot with "
            f"{' and '.join(names)}: set {' and '.join(name for name, degree in asked.items() if degree > 1)} to 0 or 1 in "
            "Parallel Plan, or remove the node that adds it."
        )


def values_of(recipe: OverrideRecipe) -> dict[str, Value]:
    """A recipe as values that go with a call."""
    filled = {field.name: value for field in fields(recipe) if (value := getattr(recipe, field.name))}
    values: dict[str, Value] = {}
    flatten(f"{OPTIONS}.{ATTENTION_OVERRIDE}", filled, {}, values)
    return values


def tried(recipe: OverrideRecipe, shape: ModelShape, dtype: torch.dtype) -> OverrideRecipe:
    """The recipe, with the names of what it holds for each head, by what it gives for some heads and for all of them.

    Raises:
        Refused: it gives something else for some heads than for all, or cannot be tried.
    """
    lists = tuple(
        name for name, value in recipe.values.items() if isinstance(value, list | tuple) and len(value) == shape.heads
    )
    said = "it gives something else for some of the heads than for all of them at once"
    for by_head in dict.fromkeys((lists, ())):
        candidate = replace(recipe, by_head=by_head)
        try:
            whole, parts = _answers(candidate, shape, dtype)
        except Exception as error:  # whatever another's code comes to
            said = f"it cannot be tried ({type(error).__name__}: {error})"
            continue
        off = (parts - whole).norm() / whole.norm().clamp(min=1e-30)
        if float(off) <= TOLERANCES.get(dtype, ROUGH):
            return candidate
    raise Refused(
        f"an attention override ({recipe.module}.{recipe.function}) cannot be applied to a parallel MODEL, because {said}: "
        "remove that node, or use Load Diffusion Model."
    )


@torch.no_grad()
def _answers(recipe: OverrideRecipe, shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of random operands all heads at once, and some and the others."""
    heads, device = shape.heads, get_torch_device()
    generator = torch.Generator().manual_seed(0)
    size = ROWS, heads, TOKENS, shape.head_dim
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for _ in range(3))
    kernel = inspect.unwrap(comfy.ldm.modules.attention.optimized_attention)

    def answer(run: slice) -> Tensor:
        own = (x[:, run].contiguous() for x in (q, k, v))
        count = len(range(heads)[run])
        out: Tensor = recipe.of_heads(run, heads)(
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


def _is_importable(function: Any) -> bool:
    """Whether workers can import a function's module: there `nodes` is this pack's, and nothing serves pages."""
    if _module_of(function) is None:
        return False
    tree = ast.parse(inspect.getsource(sys.modules[function.__module__]))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return not {name.partition(".")[0] for name in names} & ABSENT


def _place(function: Any) -> str | None:
    """`module:name` of a function that lies in a module of ComfyUI's; None for anything else."""
    module = _module_of(function)
    if module is None or function.__globals__.get(function.__qualname__) is not function:
        return None
    return f"{module}:{function.__qualname__}"


def _made_by(function: Any) -> Iterator[CodeType]:
    """The code of the functions that the method makes in which a function was made, by its qualified name."""
    owner, method, *rest = function.__qualname__.split(".")
    found = inspect.getattr_static(function.__globals__.get(owner), method, None)
    made_by = inspect.unwrap(getattr(found, "__func__", found)) if found is not None and len(rest) == 2 else None
    return (each for each in getattr(getattr(made_by, "__code__", None), "co_consts", ()) if isinstance(each, CodeType))
