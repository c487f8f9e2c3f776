"""Which of the samplers that the workers run a SAMPLER is: one of the backend's, or one of ComfyUI's own functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import comfy.k_diffusion.sampling
import comfy.samplers

from ...parallel_backend.denoise import samplers
from ...parallel_backend.diffusion import StockSampler, Value
from ...parallel_backend.errors import Refused
from .given import NotSupported
from .stock import own

OTHER_SAMPLER = "a sampler that Parallel Sampler offers, such as euler or dpmpp_2m"
"""What to choose for one that the workers do not run."""

PERCENTS = (1e-4, 0.2, 0.8)
"""Where ComfyUI's sampler functions ask the model sampling for a sigma: near the start, and where SA-Solver adds noise."""

LIBRARIES = ("numpy", "scipy", "torchsde", "tqdm", "typing")
"""What ComfyUI's sampler functions call besides ComfyUI and torch."""

CHURN = "s_churn"
"""The option with which a function draws from torch's own generator, which no seed of the graph sets."""


@dataclass(frozen=True)
class Chosen:
    """A sampler, its options, and whether ComfyUI's own function runs in the workers."""

    name: str
    options: Mapping[str, Value]
    stock: bool

    @property
    def asks_both_sides(self) -> bool:
        """Whether it uses the negative at cfg 1 too, as the CFG++ samplers do."""
        return self.name.endswith("_cfg_pp")


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
    options = {key: value for key, value in sampler.extra_options.items() if value is not None}
    name = next((n for n in samplers.SAMPLERS if _function_of(n) is function), None)
    if name is not None:
        try:
            samplers.check(name, options)
        except Refused as reason:
            if samplers.SAMPLERS[name].own or not _plain(function, options):
                raise NotSupported(f"this setting: {reason}", OTHER_SAMPLER) from None
        else:
            return Chosen(name, options, stock=False)
    name = next((n for n in comfy.samplers.SAMPLER_NAMES if _same(n, function)), None)
    if name is None or not _plain(function, options):
        unknown = name or getattr(function, "__name__", str(function)).removeprefix("sample_")
        raise NotSupported(f"the sampler {unknown}" + " with these options" * (name is not None), OTHER_SAMPLER)
    if changed := next(_changed(function), None):
        raise NotSupported(f"{changed} of another pack in the sampler {name}", OTHER_SAMPLER)
    return Chosen(name, options, stock=True)


def stock_sampler(model_sampling: Any) -> StockSampler:
    """What a function of ComfyUI's in a worker has to know of the MODEL's model sampling."""
    return StockSampler({percent: float(model_sampling.percent_to_sigma(percent)) for percent in PERCENTS})


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


def _plain(function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a function takes these options, and they can be sent."""
    takes = inspect.signature(function).parameters
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    known = any_name or set(options) <= takes.keys()
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
