"""The number of branches of a run's prompts in one model call. `cfg` 2 divides the branches."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from comfy.samplers import cond_equal_size
from torch import Tensor

from ....parallel_backend.conditioning import ALONE, BRANCHES, TOGETHER
from ....parallel_backend.diffusion import Value
from ....parallel_backend.models.comfyui.content.model_code import options_read_by
from ..features.step_cache import known_wrappers
from ..own_code import is_own_method, own
from ..recording.recording_model import KEEPS_NEGATIVE
from ..sampler_run import SamplerRun
from ..supported import GUIDER_METHODS, plain_guider

KEY = "parallel_sides"

INSTEAD = ("sampler_calc_cond_batch_function", "context_handler")
"""Model options between a guider and `calc_cond_batch` that do not change the branches."""


def has_uncond(run: SamplerRun, keeps_negative: bool) -> bool:
    """Return True if more than one branch of a guider's prompts takes part in a call.

    This function asks a guider of ComfyUI's, because only the guider knows. For instance, DualCFGGuider keeps its cfg elsewhere
    than CFGGuider, and CFGOverride changes the cfg during the run. Another pack's guider must run no more than once a step, so
    all its branches count.

    Args:
        run: the run.
        keeps_negative: True if the sampler itself uses the negative prompt whatever the cfg.
    """
    if not _known(run):
        return sum(bool(entries) for entries in run.guider.conds.values()) > 1
    if not (wrappers := _wrappers(run)) and plain_guider(run.guider):
        return _negative_counts(run, keeps_negative)
    return any(_count_branches(run, sigma, wrappers, keeps_negative) > 1 for sigma in run.sigmas[:-1])


def rows_together(run: SamplerRun) -> dict[str, Value]:
    """Return values to send with prompts that keep a prompt's rows on one rank, if ComfyUI makes a call for each prompt.

    The values are for classes that read the branches of a call. Such a class may compute rows from one another, as SeedVR2
    does.
    """
    proxy = run.guider.inner_model.diffusion_model
    if not proxy.unsharded or BRANCHES not in options_read_by(proxy.skeleton):
        return {}
    prompts = [entry["model_conds"] for entries in run.guider.conds.values() for entry in entries or ()]
    if any(cond_equal_size(*pair) for pair in itertools.combinations(prompts, 2)):
        return {}
    return {TOGETHER: run.noise.shape[0], ALONE: True}


def _known(run: SamplerRun) -> bool:
    """Return True if only ComfyUI's own code decides about a guider's branches."""
    guider = run.guider
    return all(
        own(getattr(type(guider), name)) and (name not in vars(guider) or is_own_method(guider, name))
        for name in GUIDER_METHODS
    )


def _negative_counts(run: SamplerRun, keeps_negative: bool) -> bool:
    """Return True if the negative prompt matters. At cfg 1 ComfyUI skips it unless a node or sampler uses it."""
    is_used = keeps_negative or bool(run.model_options.get(KEEPS_NEGATIVE, False))
    return run.guider.conds.get("negative") is not None and (is_used or not math.isclose(run.guider.cfg, 1.0))


def _wrappers(run: SamplerRun) -> Mapping[str, list[Any]]:
    """Return ComfyUI's own wrappers of a guider's function, by key, without step caches, which count the calls."""
    wrappers = run.transformer_options.get("wrappers", {}).get(WrappersMP.PREDICT_NOISE, {})
    caches = {key for _, key in known_wrappers(run.transformer_options)}
    return {key: functions for key, functions in wrappers.items() if key not in caches and all(map(own, functions))}


class _BranchesFound(BaseException):
    """An exception that ends a guider's function at its first model call, with the number of branches."""

    def __init__(self, conds: Sequence[Any]) -> None:
        self.count = sum(bool(branch) for branch in conds)


def _count_branches(run: SamplerRun, sigma: Tensor, wrappers: Mapping[str, list[Any]], keeps_negative: bool) -> int:
    """Return the number of branches (cond, uncond) in a guider's first model call at a sigma, without running the model."""

    def ask(executor: Any, model: Any, conds: Sequence[Any], *_: Any) -> Any:
        raise _BranchesFound(conds)

    functions = {WrappersMP.PREDICT_NOISE: dict(wrappers), WrappersMP.CALC_COND_BATCH: {KEY: [ask]}}
    options = {name: value for name, value in run.model_options.items() if name not in INSTEAD}
    options[KEEPS_NEGATIVE] = keeps_negative or bool(run.model_options.get(KEEPS_NEGATIVE, False))
    options["transformer_options"] = {**run.transformer_options, "wrappers": functions, "callbacks": {}}
    guider = copy.copy(run.guider)
    guider.model_options = options
    try:
        x = torch.zeros_like(run.noise)
        guider(x, sigma.expand(x.shape[0]), model_options=options, seed=run.extra_args.get("seed"))
    except _BranchesFound as branches:
        return branches.count
    return 0
