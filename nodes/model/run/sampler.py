"""Which of the samplers that the workers run a SAMPLER is: one of the backend's, or one of ComfyUI's own functions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

import comfy.k_diffusion.sampling
import comfy.samplers
import torch
from torch import Tensor

from ....parallel_backend.denoise import samplers
from ....parallel_backend.diffusion import GuideFunction, StockSampler, Value
from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.sampler import standing_in
from ..conditioning import NotSupported
from ..features.guidance import known_function
from ..own_code import own

OTHER_SAMPLER = "a sampler that Parallel Sampler offers, such as euler or dpmpp_2m"
"""What to choose for one that the workers do not run."""

PERCENTS = (1e-4, 0.2, 0.8)
"""Where ComfyUI's sampler functions ask the model sampling for a sigma: near the start, and where SA-Solver adds noise."""

LIBRARIES = ("numpy", "scipy", "torchsde", "tqdm", "typing")
"""What ComfyUI's sampler functions call besides ComfyUI and torch."""

MAKING_FUNCTIONS = MappingProxyType(
    {
        "nodes_custom_sampler": tuple(
            f"SamplerER_SDE.execute.<locals>.{name}_noise_scaler" for name in ("er_sde", "reverse_time_sde", "ode")
        )
    }
)
"""By module of ComfyUI's: functions that its sampler nodes give as an option, which hang on nothing but their values."""

CHURN = "s_churn"
"""The option with which a function draws from torch's own generator, which no seed of the graph sets."""


@dataclass(frozen=True)
class Chosen:
    """A sampler, its options, and whether ComfyUI's own function runs in the workers."""

    name: str
    options: Mapping[str, Value]
    stock: bool
    functions: Mapping[str, GuideFunction] = field(default_factory=dict)


def chosen(sampler: Any) -> Chosen:
    """What a graph's SAMPLER is, whose function is ComfyUI's or this pack's.

    Raises:
        NotSupported: nothing that the workers run.
    """
    if type(sampler) is not comfy.samplers.KSAMPLER:
        raise NotSupported(f"the sampler {type(sampler).__name__}", OTHER_SAMPLER)
    if set(sampler.inpaint_options) - {"random"}:
        raise NotSupported("a sampler with inpaint options", OTHER_SAMPLER)
    function = sampler.sampler_function
    given = {key: value for key, value in sampler.extra_options.items() if value is not None}
    functions = {key: found for key, value in given.items() if (found := known_function(value, MAKING_FUNCTIONS))}
    options = {key: value for key, value in given.items() if key not in functions}
    name = next((n for n in samplers.SAMPLERS if _function_of(n) is function), None)
    if name is not None:
        try:
            samplers.check(name, given)
        except Refused as reason:
            if samplers.SAMPLERS[name].own or not _plain(function, options, functions):
                raise NotSupported(f"this setting: {reason}", OTHER_SAMPLER) from None
        else:
            return Chosen(name, options, stock=False)
    name = next((n for n in comfy.samplers.SAMPLER_NAMES if _same(n, function)), None)
    if name is None or not _plain(function, options, functions):
        unknown = name or getattr(function, "__name__", str(function)).removeprefix("sample_")
        raise NotSupported(f"the sampler {unknown}" + " with these options" * (name is not None), OTHER_SAMPLER)
    if changed := next(_changed(function), None):
        raise NotSupported(f"{changed} of another pack in the sampler {name}", OTHER_SAMPLER)
    return Chosen(name, options, True, functions)


def stock_sampler(model_sampling: Any, functions: Mapping[str, GuideFunction]) -> StockSampler:
    """What a function of ComfyUI's in a worker has to know of the MODEL's model sampling, and its options that are functions."""
    percents = {percent: float(model_sampling.percent_to_sigma(percent)) for percent in PERCENTS}
    return StockSampler(percents, dict(functions))


def asks_both_sides(sampler: Any, model_sampling: Any) -> bool:
    """Whether a KSAMPLER uses the negative at cfg 1 too, as those of CFG++ do.

    Its function says so among the model options of its calls, of which the first is looked at.
    """
    asked: list[bool] = []

    def model(x: Tensor, sigma: Tensor, model_options: Mapping[str, Any] = MappingProxyType({}), **_: Any) -> Tensor:
        asked.append(bool(model_options.get("disable_cfg1_optimization", False)))
        raise _Asked

    model.inner_model = standing_in(model_sampling)  # type: ignore[attr-defined]
    x, sigmas = torch.zeros(1, 1, 2, 2), model_sampling.percent_to_sigma(0.5) * torch.tensor([1.0, 0.5, 0.0])
    with torch.random.fork_rng(devices=[]), contextlib.suppress(_Asked):
        sampler.sampler_function(
            model,
            x,
            sigmas,
            extra_args={"model_options": {}, "seed": 0},
            callback=None,
            disable=True,
            **sampler.extra_options,
        )
    return any(asked)


class _Asked(Exception):
    """A sampler has called the model."""


def runs_in_workers(name: str) -> bool:
    """Whether the workers run the sampler that ComfyUI's nodes call so."""
    try:
        chosen(comfy.samplers.sampler_object(name))
    except NotSupported:
        return False
    return True


def _function_of(name: str) -> Any:
    return getattr(comfy.k_diffusion.sampling, f"sample_{name}", None)


def _same(name: str, function: Callable[..., Any]) -> bool:
    """Whether a function is that of ComfyUI's sampler of this name; some are made anew by each call of `ksampler`."""
    theirs = comfy.samplers.sampler_object(name).sampler_function
    if not inspect.isfunction(theirs) or not inspect.isfunction(function):
        return False
    anew = theirs.__code__ is function.__code__ and theirs.__closure__ is function.__closure__ is None
    return theirs is function or (anew and theirs.__globals__ is function.__globals__)


def _plain(function: Callable[..., Any], options: Mapping[str, Any], functions: Mapping[str, GuideFunction]) -> bool:
    """Whether a function takes these options and functions, and they can be sent."""
    takes = inspect.signature(function).parameters
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    known = any_name or {*options, *functions} <= takes.keys()
    return known and CHURN not in options and all(isinstance(o, (bool, int, float, str)) for o in options.values())


def _changed(function: Callable[..., Any]) -> Iterator[str]:
    """The names of what is not ComfyUI's own of all that one of its functions calls there."""
    waiting, seen = [inspect.unwrap(function)], set()
    while waiting:
        code, names = waiting[-1].__code__, waiting.pop().__globals__
        used = {*_names(code)}
        spaces = [
            names,
            *(vars(names[n]) for n in used if isinstance(names.get(n), ModuleType) and _comfyuis(names[n])),
        ]
        for space in spaces:
            for name in used & space.keys():
                value = space[name]
                if id(value) in seen or isinstance(value, ModuleType):
                    continue
                seen.add(id(value))
                parts = vars(value).values() if isinstance(value, type) else [value]
                for part in parts:
                    if not own(part) and getattr(part, "__module__", "").partition(".")[0] not in LIBRARIES:
                        yield name
                    elif inspect.isfunction(part) and _comfyuis(inspect.getmodule(part)):
                        waiting.append(inspect.unwrap(part))


def _comfyuis(module: Any) -> bool:
    """Whether a module holds samplers of ComfyUI's."""
    return getattr(module, "__name__", "").startswith(("comfy.k_diffusion", "comfy.extra_samplers", "comfy.samplers"))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
