"""Custom nodes that change a MODEL, a GUIDER or a SAMPLER in the ways that other packs do."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import comfy.clip_vision
import comfy.hooks
import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.samplers
import folder_paths
import node_helpers
import torch
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.ldm.wan.uni3c import WanUni3CControlnet
from comfy.model_patcher import PatcherInjection
from comfy.patcher_extension import CallbacksMP
from comfy_extras.nodes_custom_sampler import Guider_DualCFG
from safetensors.torch import load_file
from torch import nn

import nodes

from .stand_ins import PackClip, PackVae
from .watched_routes import add_watched_routes


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its result halved."""

    @functools.wraps(function)
    def half(*args: Any, **kwargs: Any) -> Any:
        return 0.5 * function(*args, **kwargs)

    return half


# -- MODEL


def object_patch(name: str) -> Callable[[Any], None]:
    """Return a change of the MODEL that patches a method of the model (`add_object_patch`)."""
    return lambda patcher: patcher.add_object_patch(name, halved(patcher.get_model_object(name)))


def sampling_method(name: str) -> Callable[[Any], None]:
    """Return a change of the MODEL that gives it a copy of its model sampling with one method replaced."""

    def patch(patcher: Any) -> None:
        sampling = copy.copy(patcher.get_model_object("model_sampling"))
        setattr(sampling, name, halved(getattr(sampling, name)))
        patcher.add_object_patch("model_sampling", sampling)

    return patch


def while_running(change: Callable[[Any], Callable[[], None]]) -> Callable[[Any], None]:
    """Return a change of the MODEL that changes the model itself for the duration of a run.

    Args:
        change: changes the model, and returns a function that undoes the change.
    """

    def patch(patcher: Any) -> None:
        undo: list[Callable[[], None]] = []
        patcher.add_callback(CallbacksMP.ON_PRE_RUN, lambda running: undo.append(change(running.model)))
        patcher.add_callback(CallbacksMP.ON_CLEANUP, lambda _: [one() for one in undo])

    return patch


def on_instance(find: Callable[[Any], Any], name: str) -> Callable[[Any], None]:
    """Return a change that replaces a method of an object in the model, for a run.

    Args:
        find: returns the object, given the model.
    """

    def change(model: Any) -> Callable[[], None]:
        found = find(model)
        setattr(found, name, halved(getattr(found, name)))
        return lambda: delattr(found, name)

    return while_running(change)


def of_module(module: Any, name: str) -> Callable[[Any], None]:
    """Return a change that replaces a function of one of ComfyUI's modules, for a run."""

    def change(_: Any) -> Callable[[], None]:
        old = getattr(module, name)
        setattr(module, name, halved(old))
        return lambda: setattr(module, name, old)

    return while_running(change)


def other_class(model: Any) -> Callable[[], None]:
    """Make the model an instance of the pack's own class. Return the undo."""
    old = type(model)
    model.__class__ = type("PackModel", (old,), {"apply_model": halved(old.apply_model)})
    return lambda: setattr(model, "__class__", old)


def forward_hook(find: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a change that hooks into a module of the model, for a run."""

    def half(_module: Any, _args: Any, output: Any) -> Any:
        return tuple(0.5 * tensor for tensor in output) if isinstance(output, tuple) else 0.5 * output

    def change(model: Any) -> Callable[[], None]:
        handle: Callable[[], None] = find(model).register_forward_hook(half).remove
        return handle

    return while_running(change)


def replaced_block(model: Any) -> Callable[[], None]:
    """Replace a block by another module. Return the undo."""
    blocks = model.diffusion_model.single_blocks
    old = blocks[0]

    class Nothing(nn.Module):
        def forward(self, x: Any, *_: Any, **__: Any) -> Any:
            return x

    blocks[0] = Nothing()

    def undo() -> None:
        blocks[0] = old

    return undo


def first_weight(model: Any) -> Any:
    """Return a weight that affects the result."""
    return model.diffusion_model.img_in.weight


def edited_weight(model: Any) -> Callable[[], None]:
    """Halve a weight in place. Return the undo."""
    with torch.no_grad():
        first_weight(model).mul_(0.5)
    return lambda: first_weight(model).data.mul_(2.0)


def edited_data(model: Any) -> Callable[[], None]:
    """Halve a weight's data, which autograd does not see. Return the undo."""
    first_weight(model).data.mul_(0.5)
    return lambda: first_weight(model).data.mul_(2.0)


def new_weight(model: Any) -> Callable[[], None]:
    """Replace a weight by another parameter. Return the undo."""
    layer, old = model.diffusion_model.img_in, first_weight(model)
    layer.weight = nn.Parameter(torch.zeros(old.shape, dtype=old.dtype))
    return lambda: setattr(layer, "weight", old)


def function_within(patcher: Any) -> None:
    """Replace a function that the diffusion model's forward calls, for the duration of each call (as TeaCache packs do)."""

    def wrapper(apply_model: Any, args: dict[str, Any]) -> Any:
        model = patcher.model.diffusion_model
        model.forward_orig = halved(model.forward_orig)
        try:
            return apply_model(args["input"], args["timestep"], **args["c"])
        finally:
            del model.forward_orig

    patcher.set_model_unet_function_wrapper(wrapper)


def injection(patcher: Any) -> None:
    """Patch the model by an injection."""

    def inject(running: Any) -> None:
        running.model.apply_model = halved(running.model.apply_model)

    def eject(running: Any) -> None:
        del running.model.apply_model

    patcher.set_injections("pack", [PatcherInjection(inject=inject, eject=eject)])


PLENTY = 1 << 50
"""Bytes of free memory that suffice for all prompts of a step."""

WEIGHT = "diffusion_model.img_in.weight"


def patch_of_a_type(patcher: Any) -> None:
    """Patch a weight by a patch of the pack's own type."""
    patcher.add_patches({WEIGHT: ("pack", (torch.zeros(1),))})


def patch_with_a_function(patcher: Any) -> None:
    """Patch a weight through a function."""

    def halve(weight: Any) -> Any:
        return 0.5 * weight

    shape = patcher.model_state_dict()[WEIGHT].shape
    patcher.add_patches({(WEIGHT, None, halve): (torch.zeros(shape),)})


def patch_outside(patcher: Any) -> None:
    """Patch a tensor that is no weight of the diffusion model."""
    patcher.add_patches({"model_sampling.sigmas": (torch.zeros(1),)})


def clones(patcher: Any) -> None:
    """Make the MODEL run on other GPUs too, as ComfyUI's MultiGPU nodes do."""
    patcher.model_options["multigpu_clones"] = {}


def clone_for_a_gpu(patcher: Any) -> None:
    """Copy the MODEL to another GPU, as ComfyUI's MultiGPU nodes do."""
    patcher.deepclone_multigpu(new_load_device=torch.device("meta"))


def weight_wrapper(patcher: Any) -> None:
    """Add a wrapper that changes a weight at each use."""
    patcher.add_weight_wrapper(WEIGHT, lambda weight: weight)


def in_its_place(module: str, name: str) -> Callable[[Any], None]:
    """Return a change that replaces a function of a module that a model's forward uses, for a run."""
    return of_module(import_module(module), name)


def other_model(patcher: Any) -> None:
    """Replace the diffusion model by a model of the pack's own, for a run."""

    def change(model: Any) -> Callable[[], None]:
        old = model.diffusion_model
        model.diffusion_model = nn.Identity()
        return lambda: setattr(model, "diffusion_model", old)

    while_running(change)(patcher)


def other_class_of_a_block(model: Any) -> Callable[[], None]:
    """Make a block an instance of the pack's own class. Return the undo."""
    block = model.diffusion_model.single_blocks[0]
    old = type(block)
    block.__class__ = type("PackBlock", (old,), {"forward": halved(old.forward)})
    return lambda: setattr(block, "__class__", old)


def other_layer_class(_: Any) -> Callable[[], None]:
    """Change the class of the model's blocks. Return the undo."""
    from comfy.ldm.flux.layers import SingleStreamBlock

    old = SingleStreamBlock.forward
    SingleStreamBlock.forward = halved(old)
    return lambda: setattr(SingleStreamBlock, "forward", old)


def copied_deep(patcher: Any) -> None:
    """Copy the MODEL with everything in it."""
    copy.deepcopy(patcher)


def copied(patcher: Any) -> None:
    """Give the MODEL a copy of the model around the same diffusion model, and a patch of its own."""
    patcher.model = copy.copy(patcher.model)
    shape = patcher.model_state_dict()[WEIGHT].shape
    added = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0))
    patcher.add_patches({WEIGHT: ("diff", (0.1 * added,))})


def in_the_middle(patcher: Any) -> None:
    """Replace a function of the blocks while ComfyUI's loop runs, from the second model call on."""
    module, calls = import_module("comfy.ldm.flux.layers"), []
    old = module.attention

    def wrapper(apply_model: Any, args: dict[str, Any]) -> Any:
        calls.append(args)
        if len(calls) > 1:
            module.attention = halved(old)
        try:
            return apply_model(args["input"], args["timestep"], **args["c"])
        finally:
            module.attention = old

    patcher.set_model_unet_function_wrapper(wrapper)


def free_memory(*answers: int) -> Callable[[Any], None]:
    """Return a change that makes ComfyUI find these amounts of free memory in turn, as when workers load weights meanwhile."""

    def change(_: Any) -> Callable[[], None]:
        turns = itertools.cycle(answers)
        return replaced(comfy.model_patcher.ModelPatcher, "get_free_memory", lambda *_: next(turns))

    return while_running(change)


def other_formula(_: Any) -> Callable[[], None]:
    """Make ComfyUI's formula of a step's memory exceed the free memory, except every fourth time. Return the undo."""
    turns = itertools.cycle((True, True, True, False))
    size, steps = comfy.model_management.dtype_size, []
    undo = [
        replaced(comfy.model_patcher.ModelPatcher, "get_free_memory", lambda *_: steps.append(1) or PLENTY),
        replaced(comfy.model_management, "xformers_enabled", lambda: True),
        replaced(comfy.model_management, "dtype_size", lambda dtype: PLENTY if steps and next(turns) else size(dtype)),
    ]
    return lambda: [one() for one in undo] and None


def replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Replace an attribute of `owner`. Return the undo."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old)


MODELS: dict[str, Callable[[Any], None]] = {
    "memory that becomes free": free_memory(0, 0, PLENTY),
    "memory that is taken": free_memory(PLENTY, 0, 0),
    "another formula of memory": while_running(other_formula),
    "object patch apply_model": object_patch("apply_model"),
    "object patch process_timestep": object_patch("process_timestep"),
    "object patch diffusion_model.forward": object_patch("diffusion_model.forward"),
    "calculate_denoised of its own": sampling_method("calculate_denoised"),
    "timestep of its own": sampling_method("timestep"),
    "apply_model on the instance": on_instance(lambda model: model, "apply_model"),
    "a class of its own": while_running(other_class),
    "an injection": injection,
    "cfg_function": of_module(comfy.samplers, "cfg_function"),
    "forward on the instance": on_instance(lambda model: model.diffusion_model, "forward"),
    "a hook on the diffusion model": forward_hook(lambda model: model.diffusion_model),
    "forward_orig": function_within,
    "a hook on a block": forward_hook(lambda model: model.diffusion_model.single_blocks[0]),
    "forward on a block": on_instance(lambda model: model.diffusion_model.single_blocks[0], "forward"),
    "a block replaced": while_running(replaced_block),
    "a block of another class": while_running(other_class_of_a_block),
    "a weight edited": while_running(edited_weight),
    "a weight's data edited": while_running(edited_data),
    "a weight replaced": while_running(new_weight),
    "a patch of a type of its own": patch_of_a_type,
    "a patch with a function": patch_with_a_function,
    "a patch outside of the diffusion model": patch_outside,
    "clones for other GPUs": clones,
    "a clone for another GPU": clone_for_a_gpu,
    "a weight wrapper": weight_wrapper,
    "a model of its own": other_model,
    "a class of blocks": while_running(other_layer_class),
    "attention of the blocks": in_its_place("comfy.ldm.flux.layers", "attention"),
    "attention of the model's functions": in_its_place("comfy.ldm.flux.math", "optimized_attention"),
    "timestep_embedding": in_its_place("comfy.ldm.flux.model", "timestep_embedding"),
    "torch's gelu": in_its_place("torch.nn.functional", "gelu"),
    "attention of torch": in_its_place("torch.nn.functional", "scaled_dot_product_attention"),
    "a function in the middle of a run": in_the_middle,
    "a deep copy": copied_deep,
    "a shallow copy with a patch": copied,
    "attention that no block has": in_its_place("comfy.ldm.flux.math", "attention"),
}


class PackModel:
    """A node that changes a MODEL."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "kind": (list(MODELS),)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "change"

    def change(self, model: Any, kind: str) -> tuple[Any]:
        model = model.clone()
        MODELS[kind](model)
        return (model,)


# -- VAE


@contextlib.contextmanager
def other_function(module: Any, name: str) -> Iterator[None]:
    """Replace a function that an autoencoder's modules use, for this context."""
    old = getattr(module, name)
    setattr(module, name, halved(old))
    try:
        yield
    finally:
        setattr(module, name, old)


@contextlib.contextmanager
def seamless(vae: Any) -> Iterator[None]:
    """Use circular padding in all convolutions in this context, as seamless tiling does."""
    layers = [module for module in vae.first_stage_model.modules() if isinstance(module, nn.Conv2d)]
    for module in layers:
        module.padding_mode = "circular"
    try:
        yield
    finally:
        for module in layers:
            module.padding_mode = "zeros"


@contextlib.contextmanager
def hooked(vae: Any) -> Iterator[None]:
    """Hook into a module of the decoder, for this context."""
    handle = vae.first_stage_model.decoder.conv_in.register_forward_hook(lambda _module, _args, output: 0.5 * output)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def edited(vae: Any) -> Iterator[None]:
    """Halve a weight of the decoder, for this context."""
    weight = vae.first_stage_model.decoder.conv_in.weight
    with torch.no_grad():
        weight.mul_(0.5)
    try:
        yield
    finally:
        weight.data.mul_(2.0)


@contextlib.contextmanager
def own_forward(vae: Any) -> Iterator[None]:
    """Replace the forward of a module of the decoder by the pack's own, for this context."""
    found = vae.first_stage_model.decoder.mid.block_1
    found.forward = halved(found.forward)
    try:
        yield
    finally:
        del found.forward


@contextlib.contextmanager
def looked_at(vae: Any) -> Iterator[None]:
    """Read all modules, names and shapes, and change nothing."""
    model = vae.first_stage_model
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    named = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if not found or not named or isinstance(model, nn.Linear) or model.decoder.num_resolutions != 4:
        raise ValueError(f"{len(found)} convolutions, {len(named)} weights")
    model.to("cpu")
    yield


VAE_CHANGES: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "nothing": looked_at,
    "circular padding": seamless,
    "a hook": hooked,
    "a weight": edited,
    "a forward": own_forward,
    "nonlinearity": lambda _: other_function(import_module("comfy.ldm.modules.diffusionmodules.model"), "nonlinearity"),
}


class PackDecode:
    """A node that decodes while the VAE, or a copy of it, is changed."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        copies = ["none", "deep", "shallow", "deep, and the VAE"]
        links = {"samples": ("LATENT",), "vae": ("VAE",)}
        return {"required": {**links, "kind": (list(VAE_CHANGES),), "copied": (copies,)}}

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"

    def decode(self, samples: Any, vae: Any, kind: str, copied: str) -> tuple[Any]:
        changed = {"deep": copy.deepcopy, "shallow": copy.copy}.get(copied.partition(",")[0], lambda each: each)(vae)
        with VAE_CHANGES[kind](changed):
            return ((vae if copied.endswith("VAE") else changed).decode(samples["samples"]),)


# -- GUIDER


class StrongGuider(comfy.samplers.CFGGuider):
    """A CFGGuider whose guidance is stronger while it samples."""

    @property
    def cfg(self) -> float:
        return 2 * self._cfg

    @cfg.setter
    def cfg(self, value: float) -> None:
        self._cfg = value


class TwoStrengths(comfy.samplers.CFGGuider):
    """A guidance of the pack's own, which keeps its strength in its own attribute and counts the calls."""

    def __init__(self, patcher: Any) -> None:
        super().__init__(patcher)
        self.strength = 3.0
        self.calls: list[float] = []

    def predict_noise(self, x: Any, timestep: Any, model_options: Any = None, seed: Any = None) -> Any:
        self.calls.append(float(timestep[0]))
        sides = [self.conds["negative"], self.conds["positive"]]
        negative, positive = comfy.samplers.calc_cond_batch(self.inner_model, sides, x, timestep, model_options)
        return negative + (positive - negative) * (self.strength + len(self.calls))


def two_strengths(guider: Any, positive: Any, negative: Any) -> Any:
    """Return a guider that ignores CFGGuider's cfg and changes its strength with each call."""
    guider = TwoStrengths(guider.model_patcher)
    guider.set_conds(positive, negative)
    return guider


def too_strong_elsewhere(guider: Any, positive: Any, negative: Any) -> Any:
    """Return ComfyUI's guider with two cfgs, with values as arithmetic may set them."""
    guider = Guider_DualCFG(guider.model_patcher)
    guider.set_conds(positive, positive, negative)
    guider.set_cfg(1.0, 1e38)
    return guider


def one_sided(guider: Any, positive: Any, _: Any) -> Any:
    """Return a guider without a negative prompt, and yet with guidance."""
    guider.inner_set_conds({"positive": positive})
    guider.set_cfg(2.0)
    return guider


def own_predict_noise(guider: Any, positive: Any, negative: Any) -> Any:
    """Return a guider with a method replaced on the instance."""
    guider.set_conds(positive, negative)
    guider.set_cfg(2.0)
    guider.predict_noise = halved(guider.predict_noise)
    return guider


def subclass(guider: Any, positive: Any, negative: Any) -> Any:
    """Return a guider of the pack's subclass, which changes no method of CFGGuider."""
    guider = StrongGuider(guider.model_patcher)
    guider.set_conds(positive, negative)
    return guider


def strength(cfg: float) -> Callable[..., Any]:
    """Return a maker of a guider with a cfg as arithmetic may set it."""

    def guide(guider: Any, positive: Any, negative: Any) -> Any:
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
        return guider

    return guide


GUIDERS = {
    "no number": strength(math.nan),
    "without end": strength(math.inf),
    "too strong": strength(1e38),
    "too strong elsewhere": too_strong_elsewhere,
    "one side": one_sided,
    "predict_noise on the instance": own_predict_noise,
    "a subclass": subclass,
    "a strength of its own": two_strengths,
}


class PackGuider:
    """A node that makes a GUIDER."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        links = {"model": ("MODEL",), "positive": ("CONDITIONING",), "negative": ("CONDITIONING",)}
        return {"required": {**links, "kind": (list(GUIDERS),)}}

    RETURN_TYPES = ("GUIDER",)
    FUNCTION = "make"

    def make(self, model: Any, positive: Any, negative: Any, kind: str) -> tuple[Any]:
        return (GUIDERS[kind](comfy.samplers.CFGGuider(model), positive, negative),)


# -- callbacks

CALLBACKS: dict[str, Callable[[Any, Any], Any]] = {
    "looks": lambda x0, x: (x0.mean(), x.std()),
    "x0 in place": lambda x0, x: x0.mul_(0.9),
    "x in place": lambda x0, x: x.mul_(0.9),
    "x by its data": lambda x0, x: x.data.mul_(0.9),
    "x0 through numpy": lambda x0, x: x0.numpy().__imul__(0.9),
}


class PackCallback:
    """A node that samples with a callback of the pack's own, a new one each time."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        links = {"model": ("MODEL",), "positive": ("CONDITIONING",), "negative": ("CONDITIONING",)}
        return {"required": {**links, "latent_image": ("LATENT",), "kind": (list(CALLBACKS),), "turn": ("INT",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "sample"

    def sample(self, model: Any, positive: Any, negative: Any, latent_image: Any, kind: str, turn: int) -> tuple[Any]:
        def callback(_: int, x0: Any, x: Any, __: int) -> None:
            CALLBACKS[kind](x0, x)

        latent = comfy.sample.fix_empty_latent_channels(model, latent_image["samples"])
        noise = comfy.sample.prepare_noise(latent, 3)
        settings = [3, 2.0, "dpmpp_2m", "simple", positive, negative, latent]
        return ({"samples": comfy.sample.sample(model, noise, *settings, callback=callback, seed=3)},)


# -- SAMPLER


def own_sample(sampler: Any) -> None:
    """Replace a method on the instance."""
    sampler.sample = halved(sampler.sample)


def own_function(sampler: Any) -> None:
    """Wrap ComfyUI's function; the wrapper has the function's name."""
    sampler.sampler_function = halved(sampler.sampler_function)


def looking_function(sampler: Any) -> None:
    """Use a function that depends on the latent's norm."""
    function = sampler.sampler_function

    def sample_looking(model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return function(model, x / (1 + 0.1 * x.norm()), *args, **kwargs)

    sampler.sampler_function = sample_looking


def silent_function(sampler: Any) -> None:
    """Use a function that reports no step."""
    function = sampler.sampler_function

    def sample_silent(model: Any, x: Any, sigmas: Any, callback: Any = None, **kwargs: Any) -> Any:
        return function(model, x, sigmas, callback=None, **kwargs)

    sampler.sampler_function = sample_silent


def reading_function(sampler: Any) -> None:
    """Use a function that reads the latent's values."""
    function = sampler.sampler_function

    def sample_reading(model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return function(model, x * (0.9 if x.tolist() else 1.0), *args, **kwargs)

    sampler.sampler_function = sample_reading


def noisy_function(sampler: Any) -> None:
    """Use a function that draws its own noise."""
    function = sampler.sampler_function

    def sample_noisy(model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        return function(model, x + 0.1 * noise, *args, **kwargs)

    sampler.sampler_function = sample_noisy


def raising_function(sampler: Any) -> None:
    """Use a function that accepts a plain tensor only."""
    function = sampler.sampler_function

    def sample_raising(model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is not torch.Tensor:
            raise TypeError("a latent, please")
        return function(model, x * 0.9, *args, **kwargs)

    sampler.sampler_function = sample_raising


def noting_function(sampler: Any) -> None:
    """Use a function that leaves notes for its own model patches in the model's options."""
    function = sampler.sampler_function

    def sample_noting(model: Any, x: Any, sigmas: Any, extra_args: Any, **kwargs: Any) -> Any:
        options = extra_args["model_options"]["transformer_options"]
        options |= {"regional_weight": 0.0, "sample_sigmas": sigmas.double()}
        return function(model, x * 0.9, sigmas, extra_args=extra_args, **kwargs)

    sampler.sampler_function = sample_noting


class Turns:
    """A counter of the runs of `counting_function` samplers since one was made."""

    count = 0

    @classmethod
    def next(cls) -> int:
        cls.count += 1
        return cls.count


def counting_function(sampler: Any) -> None:
    """Use a function that counts its runs in a class of its pack."""
    function, Turns.count = sampler.sampler_function, 0

    def sample_counting(model: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return function(model, x * (1 - 0.1 * Turns.next()), *args, **kwargs)

    sampler.sampler_function = sample_counting


SAMPLERS = {
    "a function that counts its runs": counting_function,
    "a function that reads the latent": reading_function,
    "a function that draws noise": noisy_function,
    "a function that raises": raising_function,
    "a function that notes something": noting_function,
    "a function that tells nothing": silent_function,
    "sample on the instance": own_sample,
    "a function around ComfyUI's": own_function,
    "a function that looks at the latent": looking_function,
}


class PackSampler:
    """A node that makes a SAMPLER."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"kind": (list(SAMPLERS),)}}

    RETURN_TYPES = ("SAMPLER",)
    FUNCTION = "make"

    def make(self, kind: str) -> tuple[Any]:
        sampler = comfy.samplers.ksampler("euler")
        SAMPLERS[kind](sampler)
        return (sampler,)


# -- inputs of nodes for which no file of a test's size exists


class StyleModel:
    """A style model that turns a picture into tokens, as FLUX Redux does."""

    def get_cond(self, _: Any) -> torch.Tensor:
        return drawn(1, 5, 64)


def vision() -> Any:
    """Return the output of a CLIP vision model for a picture."""
    output = comfy.clip_vision.Output()
    output.last_hidden_state = drawn(1, 5, 1152)  # HunyuanVideo 1.5's width
    output.penultimate_hidden_states = drawn(1, 5, 1280)  # Wan's
    output.image_embeds = torch.zeros(1, 32)
    output.all_hidden_states = torch.zeros(1, 20, 5, 1280)
    return output


def drawn(*shape: int) -> torch.Tensor:
    """Return random numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


OBJECTS: dict[str, Callable[[], Any]] = {
    "CLIP": lambda: None,
    "CLIP_VISION_OUTPUT": vision,
    "STYLE_MODEL": StyleModel,
    "GLIGEN": lambda: None,
    "MODEL_PATCH": lambda: comfy.model_patcher.ModelPatcher(ControlPatch(), torch.device("cpu"), torch.device("cpu")),
    "LORA_MODEL": dict,
    "AUDIO_ENCODER_OUTPUT": lambda: {"encoded_audio_all_layers": [torch.zeros(1, 8, 16)] * 3, "audio_samples": 8000},
    "AUDIO": lambda: {"waveform": torch.zeros(1, 2, 8000), "sample_rate": 16000},
    "TRACKS": lambda: {"track_path": torch.zeros(5, 1, 2), "track_visibility": torch.ones(5, 1, dtype=torch.bool)},
}


class ControlPatch(nn.Linear):
    """A network whose output for a picture is added after each block, as DiffSynth's patches for Qwen-Image do."""

    additional_in_dim = 0
    project_modules: tuple[nn.Module, ...] = ()

    def __init__(self) -> None:
        super().__init__(1, 1)

    def process_input_latent_image(self, latent: torch.Tensor) -> torch.Tensor:
        return latent.flatten(2).transpose(1, 2)

    def control_block(self, img: torch.Tensor, _: torch.Tensor, __: int) -> torch.Tensor:
        return img


class PackPrompt:
    """A node that puts a file's tensors on a prompt, in place of ComfyUI's nodes that need a VAE or a vision model."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"conditioning": ("CONDITIONING",), "file": ("STRING",)}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "put"

    def put(self, conditioning: Any, file: str) -> tuple[Any]:
        given: dict[str, Any] = {}
        for name, tensor in load_file(folder_paths.get_annotated_filepath(file)).items():
            if name.startswith("clip_vision_output"):
                given[name] = comfy.clip_vision.Output()
                given[name].penultimate_hidden_states = given[name].last_hidden_state = tensor
            elif name == "gligen":
                given[name] = ("position", OBJECTS["MODEL_PATCH"](), [])
            elif name == "hooks":
                given[name] = comfy.hooks.HookGroup()
            elif not tensor.ndim or name in ("vace_strength", "reference_latents_method", "elevation", "azimuth"):
                given[name] = tensor.tolist()
            elif name.startswith("vace_"):  # one entry per control video
                given[name] = list(tensor.unbind())
            else:
                given[name] = tensor
        return (node_helpers.conditioning_set_values(conditioning, given),)


class PackText:
    """A stand-in for a text encoder that returns a fixed prompt, with every third token marked as a picture's."""

    def __init__(self, prompt: Any) -> None:
        self._prompt = prompt

    def tokenize(self, _: str, **__: Any) -> None:
        return None

    def encode_from_tokens_scheduled(self, _: Any) -> Any:
        tags = (torch.arange(self._prompt[0][0].shape[1]) % 3 > 0).long()
        return node_helpers.conditioning_set_values(self._prompt, {"minimax_token_tags": tags})


class PackEncoder:
    """A stand-in for a VAE that returns a random latent. The latent's shape depends on the input's shape."""

    audio_sample_rate = 16000

    def __init__(self, shape: Callable[..., tuple[int, ...]]) -> None:
        self._shape = shape

    def encode(self, given: torch.Tensor) -> torch.Tensor:
        return torch.randn(self._shape(*given.shape), generator=torch.Generator().manual_seed(int(given.sum())))


class PackEncoders:
    """A node that gives stand-ins for the encoders of text, videos and sounds of MiniMax-H3, and of sounds of LTX-2."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"conditioning": ("CONDITIONING",)}}

    RETURN_TYPES = ("CLIP", "VAE", "VAE", "VAE")
    FUNCTION = "give"

    def give(self, conditioning: Any) -> tuple[Any, ...]:
        shapes: tuple[Callable[..., tuple[int, ...]], ...] = (
            lambda n, height, width, _: (1, 24, 1 if n == 1 else 2 + (n - 5) // 17 * 5, height // 16, width // 16),
            lambda _, samples, __: (1, 32, 2, samples // 400),
            lambda _, samples, __: (1, 8, samples // 400, 16),
        )
        return PackText(conditioning), *(PackEncoder(shape) for shape in shapes)


class PackVoxels:
    """A node that gives shapes as voxels, and a VAE that makes one voxel of each where TRELLIS.2's makes more."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"batch": ("INT",)}}

    RETURN_TYPES = ("VOXEL", "VAE")
    FUNCTION = "give"

    def give(self, batch: int) -> tuple[Any, Any]:
        chance = torch.rand(batch, 32, 32, 32, generator=torch.Generator().manual_seed(3))
        finer = SimpleNamespace(upsample_shape=self._finer)
        vae = SimpleNamespace(prepare_decode=lambda shape: None, first_stage_model=finer, vae_dtype=torch.float32)
        return SimpleNamespace(data=chance < 0.002), vae

    @staticmethod
    def _finer(shape: Any, upsample_times: int) -> torch.Tensor:
        coords = shape.coords
        return torch.cat([coords[:, :1], coords[:, 1:] << upsample_times], dim=1)


class PackObjects:
    """A node that gives one object of each type."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    RETURN_TYPES = tuple(OBJECTS)
    FUNCTION = "give"

    def give(self) -> tuple[Any, ...]:
        return tuple(make() for make in OBJECTS.values())


class PackCountedControl:
    """A node that makes a ControlNet log each run of its network."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"control_net": ("CONTROL_NET",)}}

    RETURN_TYPES = ("CONTROL_NET",)
    FUNCTION = "count"

    def count(self, control_net: Any) -> tuple[Any]:
        network = control_net.control_model

        def said(*_: Any) -> None:
            logging.info("Pack: the network of a ControlNet runs")

        network.register_forward_pre_hook(said)
        return (control_net,)


class PackAttention:
    """A node that attends to a picture next to the text, as IPAdapter does: its function replaces an attention."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    def patch(self, model: Any) -> tuple[Any]:
        patched = model.clone()
        patched.set_model_attn2_replace(lambda q, k, v, extra_options: q, "input", 1)
        return (patched,)


class PackOverride:
    """A node that replaces all attention by a function of its own."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    def patch(self, model: Any) -> tuple[Any]:
        def override(kernel: Any, *args: Any, **named: Any) -> Any:
            return kernel(*args, **named)

        patched = model.clone()
        patched.model_options["transformer_options"]["optimized_attention_override"] = override
        return (patched,)


class PackVision:
    """A node that gives the output of a CLIP vision model for a picture, with an embedding of the given width."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"width": ("INT",)}}

    RETURN_TYPES = ("CLIP_VISION_OUTPUT",)
    FUNCTION = "give"

    def give(self, width: int) -> tuple[Any]:
        output = vision()
        output.image_embeds = drawn(1, width)
        return (output,)


class PackNetwork:
    """A node that gives a network for Qwen-Image with the given number of blocks. ComfyUI's loader assumes sixty."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"blocks": ("INT",)}}

    RETURN_TYPES = ("MODEL_PATCH",)
    FUNCTION = "give"

    def give(self, blocks: int) -> tuple[Any]:
        network = _network("QwenImageBlockWiseControlNet")
        return (_patcher(_drawn(lambda: network(blocks, operations=comfy.ops.manual_cast))),)


class PackSpeech(PackNetwork):
    """A node that gives InfiniteTalk's network with the given number of blocks, and speech. ComfyUI's loader makes forty."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"blocks": ("INT",), "width": ("INT",)}}

    RETURN_TYPES = ("MODEL_PATCH", "AUDIO_ENCODER_OUTPUT")

    def give(self, blocks: int, width: int) -> tuple[Any, Any]:
        network = _network("MultiTalkModelPatch")
        sizes = {"intermediate_dim": 8, "in_dim": width, "out_dim": 24, "context_tokens": 4, "num_layers": blocks}
        model = _drawn(lambda: network(**sizes, operations=comfy.ops.manual_cast))
        generator = torch.Generator().manual_seed(0)
        speech = [torch.randn(1, 24, 768, generator=generator) for _ in range(13)]
        return _patcher(model), {"encoded_audio_all_layers": speech}


class PackZImageNetwork(PackNetwork):
    """A node that gives a network for Z-Image with the given number of blocks.

    Nothing reads its weights, and they take no memory until they are read.
    """

    def give(self, blocks: int) -> tuple[Any]:
        model = ZImage_Control(n_control_layers=blocks, dtype=torch.bfloat16, operations=comfy.ops.manual_cast)
        return (_patcher(model),)


class PackSound:
    """A node that gives the output of a sound encoder: layers of the given width, and music as WanDancer's encoder gives it."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"layers": ("INT",), "width": ("INT",)}}

    RETURN_TYPES = ("AUDIO_ENCODER_OUTPUT",)
    FUNCTION = "give"

    def give(self, layers: int, width: int) -> tuple[Any]:
        music = {"audio_feature": drawn(1, 20, 35), "fps": 30.0}
        return ({"encoded_audio_all_layers": [*drawn(layers, 1, 24, width)], "audio_samples": 8000, **music},)


class PackUni3C(PackNetwork):
    """A node that gives Uni3C's network for a Wan of the given width, with small layers inside."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"width": ("INT",)}}

    def give(self, width: int) -> tuple[Any]:
        sizes = {"conv_out_dim": 48, "dim": 48, "ffn_dim": 48, "num_heads": 1, "num_layers": 2, "mid_channels": 8}
        widths = {"time_embed_dim": width, "out_proj_dim": width}
        return (_patcher(_drawn(lambda: WanUni3CControlnet(**sizes, **widths, operations=comfy.ops.manual_cast))),)


def _network(name: str) -> Any:
    """Return one of the classes in the module of ComfyUI's model patch nodes."""
    return getattr(sys.modules[nodes.NODE_CLASS_MAPPINGS["ModelPatchLoader"].__module__], name)


def _drawn(make: Callable[[], Any]) -> Any:
    """Return a network with random weights, always the same."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / max(parameter[0].numel(), 4) ** 0.5)
    return model


def _patcher(model: Any) -> Any:
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


class PackChangedPatch:
    """A node that changes a network itself."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model_patch": ("MODEL_PATCH",)}}

    RETURN_TYPES = ("MODEL_PATCH",)
    FUNCTION = "change"

    def change(self, model_patch: Any) -> tuple[Any]:
        model_patch = model_patch.clone()
        model_patch.add_object_patch("pack", None)
        return (model_patch,)


class PackPoseCache:
    """A node that puts its own cache where Wan Animate 2 looks for ComfyUI's. The cache has one setting more."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "keep"

    def keep(self, model: Any) -> tuple[Any]:
        cache = import_module("comfy.ldm.wan.model_animate2").PoseBranchCache()
        cache.every = 2
        model = model.clone()
        model.model_options["transformer_options"]["animate2_cache"] = cache
        return (model,)


class PackMask:
    """A node that gives a mask whose upper half has a value that arithmetic may result in, such as NaN."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("STRING",)}}

    RETURN_TYPES = ("MASK",)
    FUNCTION = "make"

    def make(self, value: str) -> tuple[torch.Tensor]:
        mask = torch.ones(1, 64, 64)
        mask[:, :32] = float(value)
        return (mask,)


class PackGuidance:
    """A node that gives a prompt a guidance that arithmetic may result in, such as NaN."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"conditioning": ("CONDITIONING",), "value": ("STRING",)}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "give"

    def give(self, conditioning: Any, value: str) -> tuple[Any]:
        return (node_helpers.conditioning_set_values(conditioning, {"guidance": float(value)}),)


NODE_CLASS_MAPPINGS = {
    "PackMask": PackMask,
    "PackPoseCache": PackPoseCache,
    "PackGuidance": PackGuidance,
    "PackNetwork": PackNetwork,
    "PackSpeech": PackSpeech,
    "PackZImageNetwork": PackZImageNetwork,
    "PackSound": PackSound,
    "PackClip": PackClip,
    "PackVae": PackVae,
    "PackUni3C": PackUni3C,
    "PackChangedPatch": PackChangedPatch,
    "PackModel": PackModel,
    "PackDecode": PackDecode,
    "PackGuider": PackGuider,
    "PackSampler": PackSampler,
    "PackCallback": PackCallback,
    "PackObjects": PackObjects,
    "PackVoxels": PackVoxels,
    "PackEncoders": PackEncoders,
    "PackPrompt": PackPrompt,
    "PackVision": PackVision,
    "PackAttention": PackAttention,
    "PackOverride": PackOverride,
    "PackCountedControl": PackCountedControl,
}

add_watched_routes()
gc.freeze()  # ComfyUI's garbage collection after every ten seconds of work would visit a million objects of imported modules
