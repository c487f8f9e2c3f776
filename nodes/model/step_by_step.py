"""A run whose loop stays in ComfyUI: its model calls, and how both sides of a step become one request to the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from comfy.patcher_extension import (
    CallbacksMP,
    WrappersMP,
    add_wrapper,
    copy_nested_dicts,
    get_all_callbacks,
    get_all_wrappers,
)
from torch import Tensor

from ...parallel_backend.conditioning import Conditioning
from ...parallel_backend.plan import ResolvedPlan
from ...parallel_backend.weights.adapters.lora import AdapterSet
from .features.controlnet import Control
from .features.controlnet_cache import with_cached_controls
from .features.controlnet_costs import ControlCosts
from .recorded_answers import RecordedAnswers
from .remote_model import RemoteModel
from .supported import changed_model
from .trials import verdicts

KEY = "parallel_step_by_step"


class StepByStep:
    """One run under one plan.

    Where the plan has a worker for each side and ComfyUI would call the model once for each (texts of two lengths), a step
    is gone through twice: first the calls are collected and answered with zeros, then one request computes them all, and
    the second time they are answered with its outputs. ComfyUI is told the same free memory both times, by which it decides
    which prompts share a call. Should it ask for another call all the same, that call is a request of its own.

    Attributes:
        unused: the number of calls of first passes that no second pass has made.
    """

    def __init__(self, plan: ResolvedPlan, working: int) -> None:
        """`working` is what `RemoteModel.free_memory` found for it."""
        self.plan = plan
        self.costs = ControlCosts()
        self._working = working
        self._collected: list[Conditioning] | None = None
        self._outputs: RecordedAnswers[Tensor] = RecordedAnswers()
        self.unused = 0

    def model_options(self, model_options: Mapping[str, Any]) -> Any:
        """A run's model options, so that its model calls find this object."""
        options = copy_nested_dicts(model_options)
        options["transformer_options"][KEY] = self
        if self.plan.cfg > 1:
            add_wrapper(WrappersMP.CALC_COND_BATCH, self._calc_cond_batch, options, is_model_options=True)
        return options

    def forward(
        self,
        remote: RemoteModel,
        call: Conditioning,
        dtype: torch.dtype,
        adapters: AdapterSet,
        control: Control | None,
    ) -> Tensor:
        """The model's output for one call, or zeros while calls are collected.

        Args:
            control: a ControlNet's output; no calls are collected then.
        """
        if self._collected is not None:
            self._collected.append(call)
            return torch.zeros_like(call.tensors["x"])
        return self._outputs.take(
            (call.tensors, call.values),
            lambda: remote.forward([call], dtype, adapters, self.plan, self._working, control)[0],
        )

    def _calc_cond_batch(
        self, executor: Any, model: Any, conds: Sequence[Any], x: Tensor, timestep: Tensor, options: dict[str, Any]
    ) -> Any:
        if _going_twice_would_show(executor, model, conds, options):
            return executor(model, conds, x, timestep, options)
        conds, controls = with_cached_controls(conds, self.costs)
        with model.current_patcher.one_free_memory():
            calls = self._collect(lambda: executor(model, conds, x, timestep, options))
            for control in controls:
                control.begin_again()
            proxy = model.diffusion_model
            one_size = len({call.tensors["x"].shape[1:] for call in calls}) == 1  # areas may differ in size
            try:
                for batch in [calls] if one_size else [[call] for call in calls]:
                    first = batch[0].tensors["x"]
                    adapters = proxy.adapters(options["transformer_options"], first.shape)
                    with self.costs.request(batch):
                        outputs = proxy.remote.forward(batch, first.dtype, adapters, self.plan, self._working)
                    for call, output in zip(batch, outputs, strict=True):
                        self._outputs.add((call.tensors, call.values), output)
                result = executor(model, conds, x, timestep, options)
                self.unused += len(self._outputs)
            finally:  # no answer of this step is for another one, whatever ended it
                self._outputs = RecordedAnswers()
        return result

    def _collect(self, run_pass: Callable[[], Any]) -> list[Conditioning]:
        """Return the model calls that a step makes, which are answered with zeros."""
        calls: list[Conditioning] = []
        self._collected = calls
        try:
            run_pass()
        finally:
            self._collected = None
        return calls


def _going_twice_would_show(executor: Any, model: Any, conds: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return True if a step has only one branch, or if another function takes part that must run once."""
    transformer = options["transformer_options"]
    wrapped = (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
    called = (CallbacksMP.ON_PREPARE_STATE, CallbacksMP.ON_APPLY_HOOKS)
    return (
        sum(bool(branch) for branch in conds) < 2
        or executor.idx + 1 < len(executor.wrappers)
        or "model_function_wrapper" in options
        or (_controlled(conds) and not model.diffusion_model.unsharded)
        or any(get_all_wrappers(kind, transformer) for kind in wrapped)
        or any(get_all_callbacks(kind, transformer) for kind in called)
        or changed_model(model) is not None
        or verdicts().unverified("guidance")
    )


def _controlled(conds: Sequence[Any]) -> bool:
    """Return True if a ControlNet takes part. On a parallelised model its output goes only with single calls."""
    return any(entry.get("control") is not None for branch in conds for entry in branch or ())
