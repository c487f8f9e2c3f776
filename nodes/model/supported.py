"""The parts of a MODEL, and of a run, that the workers' loop supports.

The check is an allow list. Anything unknown keeps a run out of the workers' loop; ComfyUI's loop then does the run, one forward
per request. `unchanged.py` checks the inside of the diffusion model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

import comfy.k_diffusion.sampling
import comfy.model_base
import comfy.samplers
from comfy.patcher_extension import CallbacksMP, WrappersMP, copy_nested_dicts
from torch.utils._pytree import tree_leaves

from ...parallel_backend.snapshot import same_items
from .features.compile import KEY as COMPILED
from .features.compile import OPTION as COMPILE_OPTION
from .features.compile import compiles
from .features.node_functions import GUIDANCE, guidance_functions
from .features.step_cache import KEY as STEP_CACHE
from .features.step_cache import known_wrappers
from .own_code import foreign, foreign_class, own

GUIDER_METHODS = ("__call__", "outer_predict_noise", "predict_noise")
"""Methods of CFGGuider that a guider class must inherit unchanged to do plain CFG, as BasicGuider does."""

MODEL_METHODS = ("apply_model", "_apply_model", "process_timestep")
"""Methods of BaseModel that the workers' loop reimplements. A model's own version counts as unknown unless workers call it."""

FUNCTIONS = (
    (comfy.samplers, "sampling_function"),
    (comfy.samplers, "calc_cond_batch"),
    (comfy.samplers, "_calc_cond_batch_outer"),
    (comfy.samplers, "_calc_cond_batch"),
    (comfy.samplers, "cfg_function"),
    (comfy.k_diffusion.sampling, "default_noise_sampler"),
)
"""Functions of ComfyUI's that the workers' loop reimplements."""

CLASSES = (comfy.samplers, "KSamplerX0Inpaint"), (comfy.k_diffusion.sampling, "BrownianTreeNoiseSampler")
"""Classes of ComfyUI's that the workers' loop reimplements."""

OBJECT_PATCHES = {"model_sampling", "manual_cast_dtype"}
"""Object patches that a run may have. The noise process is checked by itself; requests carry the compute dtype."""

MODEL_OPTIONS = {"transformer_options", "to_load_options", "disable_cfg1_optimization"}
"""Model options that a run may have. Any other option changes the denoise in this process."""

WRAPPERS = {WrappersMP.OUTER_SAMPLE, WrappersMP.PREPARE_SAMPLING, WrappersMP.SAMPLER_SAMPLE}
"""Kinds of wrappers around the loop, which may be there. All other kinds are inside the loop."""

CALLBACKS = {
    CallbacksMP.ON_CLONE, CallbacksMP.ON_LOAD, CallbacksMP.ON_DETACH, CallbacksMP.ON_CLEANUP, CallbacksMP.ON_PRE_RUN,
    CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES, CallbacksMP.ON_INJECT_MODEL, CallbacksMP.ON_EJECT_MODEL
}  # fmt: skip
"""Callbacks before and after a run, which may be there. Their changes of the model are checked by themselves."""


def not_supported(guider: Any, sampler: Any, model_options: Mapping[str, Any]) -> str | None:
    """Return the first thing in a run that the workers' loop does not support, in the user's words; None if there is none."""
    return next(_unknown(guider, sampler, model_options), None)


def changed_model(model: Any) -> str | None:
    """Return the first thing of another pack's in a model outside its diffusion model; None if there is none."""
    return next(_unknown_in_model(model), None)


def plain_guider(guider: Any) -> bool:
    """Return True if a guider's class does plain CFG, as CFGGuider does."""
    plain = comfy.samplers.CFGGuider
    return all(getattr(type(guider), name, None) is getattr(plain, name) for name in GUIDER_METHODS)


def _unknown(guider: Any, sampler: Any, model_options: Mapping[str, Any]) -> Iterator[str]:
    if not plain_guider(guider):
        yield f"the guider {type(guider).__name__}"
    yield from foreign(guider, "guider")
    yield from _unknown_branches(guider)
    yield from foreign(sampler, "sampler")
    for options in (model_options, guider.model_options):
        known = {(WrappersMP.APPLY_MODEL, COMPILED)} if compiles(options) else set()
        names = MODEL_OPTIONS | ({COMPILE_OPTION} if known else set())
        names |= {GUIDANCE} if guidance_functions(options) is not None else set()
        yield from (f"the model option {name}" for name in sorted(set(options) - names))
        yield from _unknown_hooks(options, known)
    yield from _unknown_in_model(guider.inner_model)
    for module, name in FUNCTIONS:
        if not own(vars(module).get(name)):
            yield f"the function {name} of another pack"
    for module, name in CLASSES:
        yield from (f"{what} in {name}" for what in foreign_class(vars(module)[name]))


def _unknown_branches(guider: Any) -> Iterator[str]:
    if not guider.conds.get("positive"):
        yield "a guider without a positive prompt"
    if not guider.conds.get("negative") and guider.cfg != 1.0:
        yield f"a guider without a negative prompt at cfg {guider.cfg:g}"


def _unknown_hooks(model_options: Mapping[str, Any], known: Collection[tuple[str, str]]) -> Iterator[str]:
    transformer_options = model_options.get("transformer_options", {})
    cache = known_wrappers(transformer_options)
    if cache:
        yield from foreign(transformer_options[STEP_CACHE], "step cache")
    for kind, wrappers in transformer_options.get("wrappers", {}).items():
        if kind not in WRAPPERS:
            unknown = (
                name for name, functions in wrappers.items() if functions and (kind, name) not in {*known, *cache}
            )
            yield from (f"the {kind} wrapper {name or 'unnamed'}" for name in unknown)
    for kind, callbacks in transformer_options.get("callbacks", {}).items():
        every = [callback for named in callbacks.values() for callback in named]
        prepares = kind == CallbacksMP.ON_PREPARE_STATE
        if (
            every
            and kind not in CALLBACKS
            and not (prepares and all(_changes_nothing(function, model_options) for function in every))
        ):
            yield f"the callback {kind}"


def _unknown_in_model(model: Any) -> Iterator[str]:
    patcher, plain = model.current_patcher, comfy.model_base.BaseModel
    yield from (f"the object patch {name}" for name in sorted(set(patcher.object_patches) - OBJECT_PATCHES))
    yield from (f"the injection {name}" for name, functions in patcher.injections.items() if functions)
    if patcher.forced_hooks is not None:
        yield "hooks on the whole model"
    yield from foreign(model, "model")
    known_methods = model.diffusion_model.remote.family.called_methods
    for name in MODEL_METHODS:
        if name not in known_methods and getattr(type(model), name) is not getattr(plain, name):
            yield f"{name} of {type(model).__name__}"
    yield from foreign(model.model_sampling, "model sampling")
    yield from foreign(model.diffusion_model, "diffusion model")
    if any(hooks for table, hooks in vars(model.diffusion_model).items() if table.endswith("_hooks")):
        yield "a hook on the diffusion model"


def _changes_nothing(callback: Any, model_options: Mapping[str, Any]) -> bool:
    """Return True if a callback before each step has no effect on a run.

    The callback must be ComfyUI's own, read neither model nor timestep, and change no model option. BlockSparseAttention's
    callback sets its attention function again, which is already set.
    """
    if not own(callback):
        return False
    options = copy_nested_dicts(model_options)
    try:
        for _ in range(2):
            callback(_Unreadable(), _Unreadable(), options)
    except Exception:  # the callback reads an argument
        return False
    return _holds_same(options, model_options)


def _holds_same(ours: Any, theirs: Any) -> bool:
    """Return True if two trees of dicts hold identical objects. The dicts themselves may be copies."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_holds_same(ours[name], theirs[name]) for name in ours)
    return same_items(tree_leaves(ours), tree_leaves(theirs))


class _Unreadable:
    """An argument of a callback that raises LookupError when it is read."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise LookupError

    __getattr__ = __getitem__ = __bool__ = __float__ = __iter__ = __len__ = __eq__ = __hash__ = _refuse  # type: ignore[assignment]
