"""A run whose loop stays in ComfyUI. Both branches of a step become one request to the workers."""

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

    If the plan has a worker for each branch and ComfyUI would call the model once per branch (texts of two lengths), each step
    runs twice. The first pass collects the model calls and answers with zeros. Then one request computes all calls, and the
    second pass gets the outputs. Both passes report the same free memory to ComfyUI, which decides by it which prompts share a
    call. If the second pass still makes another call, that call becomes a request by itself.

    Attributes:
        unused: the number of calls of first passes that no second pass has made.
    """

    def __init__(self, plan: ResolvedPlan, working: int) -> None:
        """Start a run. `working` is the result of `RemoteModel.free_memory`."""
        self.plan = plan
        self.costs = ControlCosts()
        self._working = working
        self._collected: list[Conditioning] | None = None
        self._outputs: RecordedAnswers[Tensor] = RecordedAnswers()
        self.unused = 0

    def model_options(self, model_options: Mapping[str, Any]) -> Any:
        """Return a copy of a run's model options in which model calls find this object."""
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
        """Return the model's output for one call, or zeros while calls are collected.

        Args:
            remote: the model.
            call: the call's inputs.
            dtype: the compute dtype.
            adapters: LoRA and its kin, and the networks.
            control: a ControlNet's output. No calls are collected if there is one.
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
            finally:  # outputs of this step must not answer another step's calls, also after an error
                self._outputs = RecordedAnswers()
        return result

    def _collect(self, run_pass: Callable[[], Any]) -> list[Conditioning]:
        """Return the model calls of a step, which get zeros as answers."""
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
    """Return True if a ControlNet takes part. A parallelised model takes a ControlNet's output only with single calls."""
    return any(entry.get("control") is not None for branch in conds for entry in branch or ())
