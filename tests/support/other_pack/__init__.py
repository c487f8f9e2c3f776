"""Custom nodes that change a MODEL, a VAE, a GUIDER or a SAMPLER in the ways that other packs do."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher, PatcherInjection
from comfy.patcher_extension import CallbacksMP
from comfy_extras.nodes_custom_sampler import Guider_DualCFG
from torch import nn

from . import inputs as inputs
from .cards import add_cards
from .registry import NODE_CLASS_MAPPINGS as NODE_CLASS_MAPPINGS
from .registry import node
from .watched_routes import add_watched_routes

Change = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""A change of a model, or of the modules of a VAE, which lasts as long as its context."""

PLENTY = 1 << 50
"""Bytes of free memory that suffice for all prompts of a step."""

WEIGHT = "diffusion_model.img_in.weight"
BLOCK = "diffusion_model.single_blocks.0"


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its result halved."""

    @functools.wraps(function)
    def half(*args: Any, **kwargs: Any) -> Any:
        return 0.5 * function(*args, **kwargs)

    return half


def halve(weight: Any) -> Any:
    return 0.5 * weight


# -- changes of a model or of a VAE's modules


def part_of(model: Any, path: str) -> Any:
    """Return the part of a model with this path, or the module, class or function that the path names."""
    if path.startswith(("comfy.", "torch.")):
        return pkgutil.resolve_name(path)
    return functools.reduce(getattr, path.split(".") if path else [], model)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object, class or module in this context."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if isinstance(old, MethodType):
            delattr(owner, name)
        else:
            setattr(owner, name, old)


def attribute(path: str, changed: Callable[[Any], Any] = halved) -> Change:
    """Return a change that replaces what is found at the path by `changed` of it."""

    @contextlib.contextmanager
    def change(model: Any) -> Iterator[None]:
        owner, _, name = path.rpartition(".")
        with replaced(part_of(model, owner), name, changed(part_of(model, path))):
            yield

    return change


def hook(path: str) -> Change:
    """Return a change that hooks into a module, and halves its output."""

    def half(_module: Any, _args: Any, output: Any) -> Any:
        return tuple(0.5 * tensor for tensor in output) if isinstance(output, tuple) else 0.5 * output

    return lambda model: part_of(model, path).register_forward_hook(half)


def edited(path: str) -> Change:
    """Return a change that halves a weight in place."""

    @contextlib.contextmanager
    def change(model: Any) -> Iterator[None]:
        with torch.no_grad():
            part_of(model, path).mul_(0.5)
        try:
            yield
        finally:
            with torch.no_grad():
                part_of(model, path).mul_(2.0)

    return change


def subclassed(method: str) -> Callable[[type], type]:
    """Return a function that derives the pack's own class from a class, with one method replaced."""
    return lambda kind: type("PackModel", (kind,), {method: halved(getattr(kind, method))})


def free_memory(*answers: int) -> Change:
    """Return a change that makes ComfyUI find these amounts of free memory in turn, as when workers load weights meanwhile."""

    def answering(_: Any) -> Callable[..., int]:
        turns = itertools.cycle(answers)
        return lambda *_: next(turns)

    return attribute("comfy.model_patcher.ModelPatcher.get_free_memory", answering)


@contextlib.contextmanager
def other_formula(_: Any) -> Iterator[None]:
    """Make ComfyUI's formula of a step's memory exceed the free memory in this context, except every fourth time."""
    turns = itertools.cycle((True, True, True, False))
    management, size, steps = comfy.model_management, comfy.model_management.dtype_size, []
    with (
        replaced(ModelPatcher, "get_free_memory", lambda *_: steps.append(1) or PLENTY),
        replaced(management, "xformers_enabled", lambda: True),
        replaced(management, "dtype_size", lambda dtype: PLENTY if steps and next(turns) else size(dtype)),
    ):
        yield


# -- MODEL


def during_run(change: Change) -> Callable[[Any], None]:
    """Return a change of the MODEL that changes the model itself for the duration of a run."""

    def patch(patcher: Any) -> None:
        stack = contextlib.ExitStack()
        patcher.add_callback(CallbacksMP.ON_PRE_RUN, lambda running: stack.enter_context(change(running.model)))
        patcher.add_callback(CallbacksMP.ON_CLEANUP, lambda _: stack.close())

    return patch


def during_calls(change: Change, first: int = 0) -> Callable[[Any], None]:
    """Return a change of the MODEL that changes the model during each call from the `first` on, as TeaCache packs do."""

    def patch(patcher: Any) -> None:
        numbers = itertools.count()

        def wrapper(apply_model: Any, args: dict[str, Any]) -> Any:
            with change(patcher.model) if next(numbers) >= first else contextlib.nullcontext():
                return apply_model(args["input"], args["timestep"], **args["c"])

        patcher.set_model_unet_function_wrapper(wrapper)

    return patch


def object_patch(name: str, method: str = "") -> Callable[[Any], None]:
    """Return a change of the MODEL that patches a method of the model, or an object by a copy with one `method` replaced."""

    def patch(patcher: Any) -> None:
        found = patcher.get_model_object(name)
        changed = copy.copy(found) if method else halved(found)
        if method:
            setattr(changed, method, halved(getattr(changed, method)))
        patcher.add_object_patch(name, changed)

    return patch


def injection(patcher: Any) -> None:
    """Patch the model by an injection."""
    stack = contextlib.ExitStack()
    injected = PatcherInjection(
        inject=lambda running: stack.enter_context(attribute("apply_model")(running.model)),
        eject=lambda _: stack.close(),
    )
    patcher.set_injections("pack", [injected])


def copied(patcher: Any) -> None:
    """Give the MODEL a copy of the model around the same diffusion model, and a patch of its own."""
    patcher.model = copy.copy(patcher.model)
    shape = patcher.model_state_dict()[WEIGHT].shape
    added = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0))
    patcher.add_patches({WEIGHT: ("diff", (0.1 * added,))})


def patched_by_a_function(patcher: Any) -> None:
    """Patch a weight through a function."""
    shape = patcher.model_state_dict()[WEIGHT].shape
    patcher.add_patches({(WEIGHT, None, halve): (torch.zeros(shape),)})


def overridden(kernel: Any, *args: Any, **named: Any) -> Any:
    return kernel(*args, **named)


def with_options(**options: Any) -> Callable[[Any], None]:
    """Return a change of the MODEL that gives its transformer these options."""
    return lambda patcher: patcher.model_options["transformer_options"].update(options)


def pose_cache(patcher: Any) -> None:
    """Put a cache of the pack's own where Wan Animate 2 looks for ComfyUI's. The cache has one setting more."""
    cache = pkgutil.resolve_name("comfy.ldm.wan.model_animate2.PoseBranchCache")()
    cache.every = 2
    with_options(animate2_cache=cache)(patcher)


MODELS: dict[str, Callable[[Any], Any]] = {
    "memory that becomes free": during_run(free_memory(0, 0, PLENTY)),
    "memory that is taken": during_run(free_memory(PLENTY, 0, 0)),
    "another formula of memory": during_run(other_formula),
    "object patch apply_model": object_patch("apply_model"),
    "object patch process_timestep": object_patch("process_timestep"),
    "object patch diffusion_model.forward": object_patch("diffusion_model.forward"),
    "calculate_denoised of its own": object_patch("model_sampling", "calculate_denoised"),
    "timestep of its own": object_patch("model_sampling", "timestep"),
    "apply_model on the instance": during_run(attribute("apply_model")),
    "a class of its own": during_run(attribute("__class__", subclassed("apply_model"))),
    "an injection": injection,
    "cfg_function": during_run(attribute("comfy.samplers.cfg_function")),
    "forward on the instance": during_run(attribute("diffusion_model.forward")),
    "a hook on the diffusion model": during_run(hook("diffusion_model")),
    "forward_orig": during_calls(attribute("diffusion_model.forward_orig")),
    "a hook on a block": during_run(hook(BLOCK)),
    "forward on a block": during_run(attribute(f"{BLOCK}.forward")),
    "a block replaced": during_run(attribute(BLOCK, lambda _: nn.Identity())),
    "a block of another class": during_run(attribute(f"{BLOCK}.__class__", subclassed("forward"))),
    "a weight edited": during_run(edited(WEIGHT)),
    "a weight's data edited": during_run(edited(f"{WEIGHT}.data")),
    "a weight replaced": during_run(
        attribute(WEIGHT, lambda old: nn.Parameter(torch.zeros(old.shape, dtype=old.dtype)))
    ),
    "a patch with a function": patched_by_a_function,
    "clones for other GPUs": lambda patcher: patcher.model_options.update(multigpu_clones={}),
    "a clone for another GPU": lambda patcher: patcher.deepclone_multigpu(new_load_device=torch.device("meta")),
    "a weight wrapper": lambda patcher: patcher.add_weight_wrapper(WEIGHT, halve),
    "a model of its own": during_run(attribute("diffusion_model", lambda _: nn.Identity())),
    "attention of the blocks": during_run(attribute("comfy.ldm.flux.layers.attention")),
    "attention of torch": during_run(attribute("torch.nn.functional.scaled_dot_product_attention")),
    "attention from the second call on": during_calls(attribute("comfy.ldm.flux.layers.attention"), first=1),
    "a deep copy": copy.deepcopy,
    "a shallow copy with a patch": copied,
    "positions that are no numbers": with_options(rope_options={"scale_x": torch.ones(2)}),
}


NODES: dict[str, Callable[[Any], Any]] = {
    "PackAttention": lambda patcher: patcher.set_model_attn2_replace(lambda q, k, v, extra_options: q, "input", 1),
    "PackOverride": with_options(optimized_attention_override=overridden),
    "PackPoseCache": pose_cache,
}
"""Changes that are nodes of their own: attention to a picture as by IPAdapter, a function for all attention, and a cache."""


@node("PackModel", "MODEL", model="MODEL", kind=list(MODELS))
def change_model(model: Any, kind: str) -> Any:
    model = model.clone()
    (MODELS | NODES)[kind](model)
    return model


for name in NODES:
    node(name, "MODEL", model="MODEL")(functools.partial(change_model, kind=name))


# -- VAE


@contextlib.contextmanager
def seamless(model: Any) -> Iterator[None]:
    """Use circular padding in all convolutions in this context, as seamless tiling does."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                stack.enter_context(replaced(module, "padding_mode", "circular"))
        yield


@contextlib.contextmanager
def looked_at(model: Any) -> Iterator[None]:
    """Read all modules, names and shapes, and change nothing."""
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    named = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if not found or not named or isinstance(model, nn.Linear) or model.decoder.num_resolutions != 4:
        raise ValueError(f"{len(found)} convolutions, {len(named)} weights")
    model.to("cpu")
    yield


VAE_CHANGES: dict[str, Change] = {
    "nothing": looked_at,
    "circular padding": seamless,
    "a hook": hook("decoder.conv_in"),
    "a weight": edited("decoder.conv_in.weight"),
    "a forward": attribute("decoder.mid.block_1.forward"),
    "nonlinearity": attribute("comfy.ldm.modules.diffusionmodules.model.nonlinearity"),
}
COPIES = ["none", "deep", "shallow", "deep, and the VAE"]


@node("PackDecode", "IMAGE", samples="LATENT", vae="VAE", kind=list(VAE_CHANGES), copied=COPIES)
def decode(samples: Any, vae: Any, kind: str, copied: str) -> Any:
    """Decode while the VAE, or a copy of it, is changed."""
    changed = {"deep": copy.deepcopy, "shallow": copy.copy}.get(copied.partition(",")[0], lambda each: each)(vae)
    with VAE_CHANGES[kind](changed.first_stage_model):
        return (vae if copied.endswith("VAE") else changed).decode(samples["samples"])


# -- GUIDER


class StrongGuider(comfy.samplers.CFGGuider):
    """A CFGGuider whose guidance is stronger while it samples. It changes no method."""

    @property
    def cfg(self) -> float:
        return 2 * self._cfg

    @cfg.setter
    def cfg(self, value: float) -> None:
        self._cfg = value


class TwoStrengths(comfy.samplers.CFGGuider):
    """A guidance of the pack's own, which keeps its strength in its own attribute and makes it stronger with each call."""

    def __init__(self, patcher: Any) -> None:
        super().__init__(patcher)
        self.strength = 3.0
        self.calls: list[float] = []

    def predict_noise(self, x: Any, timestep: Any, model_options: Any = None, seed: Any = None) -> Any:
        self.calls.append(float(timestep[0]))
        sides = [self.conds["negative"], self.conds["positive"]]
        negative, positive = comfy.samplers.calc_cond_batch(self.inner_model, sides, x, timestep, model_options)
        return negative + (positive - negative) * (self.strength + len(self.calls))


CFGGuider = comfy.samplers.CFGGuider
GUIDERS: dict[str, tuple[type, tuple[float, ...]]] = {
    "no number": (CFGGuider, (math.nan,)),
    "without end": (CFGGuider, (math.inf,)),
    "too strong": (CFGGuider, (1e38,)),
    "too strong elsewhere": (Guider_DualCFG, (1.0, 1e38)),
    "one side": (CFGGuider, (2.0,)),
    "predict_noise on the instance": (CFGGuider, (2.0,)),
    "a subclass": (StrongGuider, ()),
    "a strength of its own": (TwoStrengths, ()),
}
"""Kinds of guiders: the class, and the values of cfg, some as arithmetic may set them."""


@node("PackGuider", "GUIDER", model="MODEL", positive="CONDITIONING", negative="CONDITIONING", kind=list(GUIDERS))
def make_guider(model: Any, positive: Any, negative: Any, kind: str) -> Any:
    guider_class, cfg = GUIDERS[kind]
    guider = guider_class(model)
    if kind == "one side":
        guider.inner_set_conds({"positive": positive})
    else:
        guider.set_conds(*[positive] * len(cfg or "1"), negative)
    if cfg:
        guider.set_cfg(*cfg)
    if kind == "predict_noise on the instance":
        guider.predict_noise = halved(guider.predict_noise)
    return guider


# -- callbacks

CALLBACKS: dict[str, Callable[[Any, Any], Any]] = {
    "looks": lambda x0, x: (x0.mean(), x.std()),
    "x0 in place": lambda x0, x: x0.mul_(0.9),
    "x in place": lambda x0, x: x.mul_(0.9),
    "x by its data": lambda x0, x: x.data.mul_(0.9),
    "x0 through numpy": lambda x0, x: x0.numpy().__imul__(0.9),
}
LINKS = {"model": "MODEL", "positive": "CONDITIONING", "negative": "CONDITIONING", "latent_image": "LATENT"}


@node("PackCallback", "LATENT", **LINKS, kind=list(CALLBACKS), turn="INT")
def sample(model: Any, positive: Any, negative: Any, latent_image: Any, kind: str, turn: int) -> Any:
    """Sample with a callback of the pack's own, a new one each time."""

    def callback(_: int, x0: Any, x: Any, __: int) -> None:
        CALLBACKS[kind](x0, x)

    latent = comfy.sample.fix_empty_latent_channels(model, latent_image["samples"])
    noise = comfy.sample.prepare_noise(latent, 3)
    settings = [3, 2.0, "dpmpp_2m", "simple", positive, negative, latent]
    return {"samples": comfy.sample.sample(model, noise, *settings, callback=callback, seed=3)}


# -- SAMPLER


def around(name: str, changed: Callable[[Any, Any, dict[str, Any]], Any]) -> Callable[[Any], Any]:
    """Return a maker of a sampler function around ComfyUI's.

    Args:
        name: the function's name.
        changed: receives the latent, the sigmas and the other arguments, which it may change, and returns the latent to sample.
    """

    def wrap(function: Any) -> Any:
        def sample(model: Any, x: Any, sigmas: Any, **given: Any) -> Any:
            x = changed(x, sigmas, given)
            return function(model, x, sigmas, **given)

        sample.__name__ = f"sample_{name}"
        return sample

    return wrap


def unreported(x: Any, _sigmas: Any, given: dict[str, Any]) -> Any:
    given["callback"] = None
    return x


def noted(x: Any, sigmas: Any, given: dict[str, Any]) -> Any:
    """Leave notes for the pack's model patches in the model's options."""
    notes = {"regional_weight": 0.0, "sample_sigmas": sigmas.double()}
    given["extra_args"]["model_options"]["transformer_options"].update(notes)
    return x * 0.9


class Turns:
    """A counter of the runs of samplers since the last one was made."""

    count = 0

    @classmethod
    def next(cls) -> int:
        cls.count += 1
        return cls.count


SAMPLERS = {
    "a function that counts its runs": around("counting", lambda x, *_: x * (1 - 0.1 * Turns.next())),
    "a function that notes something": around("noting", noted),
    "a function that tells nothing": around("silent", unreported),
    "a function around ComfyUI's": halved,
    "a function that looks at the latent": around("looking", lambda x, *_: x / (1 + 0.1 * x.norm())),
    "sample on the instance": halved,
}


@node("PackSampler", "SAMPLER", kind=list(SAMPLERS))
def make_sampler(kind: str) -> Any:
    Turns.count = 0
    sampler = comfy.samplers.ksampler("euler")
    name = "sample" if kind == "sample on the instance" else "sampler_function"
    setattr(sampler, name, SAMPLERS[kind](getattr(sampler, name)))
    return sampler


add_watched_routes()
add_cards()
gc.freeze()  # ComfyUI's garbage collection after every ten seconds of work would visit a million objects of imported modules
