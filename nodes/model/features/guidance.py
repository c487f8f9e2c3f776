"""ComfyUI's own guidance nodes on a MODEL whose functions the workers run after classifier-free guidance."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import comfy.samplers

from ....parallel_backend.diffusion import GuidanceFunction
from .rebuilt import mismatch_of

OPTION = "sampler_post_cfg_function"
"""The model option in which nodes put such functions, the first one first."""

FOLDER = Path(comfy.samplers.__file__).parents[1] / "comfy_extras"

KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "nodes_cfg": ("CFGNorm.execute.<locals>.cfg_norm", "CFGZeroStar.execute.<locals>.cfg_zero_star"),
        "nodes_eps": ("EpsilonScaling.execute.<locals>.epsilon_scaling_function",),
    }
)
"""By module: functions that treat each latent of a batch for itself and keep nothing."""


def guidance_functions(model_options: Mapping[str, Any]) -> list[GuidanceFunction] | None:
    """Return the functions that change the guidance, in ComfyUI's order; None if any function is unknown."""
    known = [known_function(function, KNOWN) for function in model_options.get(OPTION, ())]
    return None if None in known else [guide for guide in known if guide is not None]


def known_function(function: Any, known: Mapping[str, Collection[str]]) -> GuidanceFunction | None:
    """What a node's function is called, and its own values; None unless it is one of those known by module, unchanged."""
    name = module_of(function, known)
    values = {} if name is None else inspect.getclosurevars(function).nonlocals
    if name is None or not all(isinstance(value, (bool, int, float)) for value in values.values()):
        return None
    return GuidanceFunction(name, function.__qualname__, dict(values))


def module_of(function: Any, known: Mapping[str, Collection[str]]) -> str | None:
    """Return the module of a node's function; None unless the module is known and unchanged."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    name = Path(getattr(module, "__file__", None) or "").stem
    if not inspect.isfunction(function) or function.__qualname__ not in known.get(name, ()):
        return None
    owner, method, _, _ = function.__qualname__.split(".")
    if getattr(module, "__file__", None) != str(FOLDER / f"{name}.py") or function.__globals__ is not vars(module):
        return None
    maker = inspect.unwrap(inspect.getattr_static(vars(module)[owner], method).__func__)
    helpers = [vars(module)[used] for used in function.__code__.co_names if used in vars(module)]
    unchanged = function.__code__ in maker.__code__.co_consts and all(_of(module, helper) for helper in helpers)
    return name if unchanged and mismatch_of(function) is None else None


def _of(module: Any, used: Any) -> bool:
    """Whether what a function uses is another module, or a function of its own one."""
    return isinstance(used, ModuleType) or getattr(used, "__globals__", None) is vars(module)
