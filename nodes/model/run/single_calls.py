"""Run ComfyUI's own loop, in which each model call is a request to the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....parallel_backend.host.runs.finite import check_sampled
from ....parallel_backend.plan import ResolvedPlan
from ...progress import NodeRun
from ..conditioning import NotSupported
from ..dtypes import dtype_name
from ..features.controlnet_costs import ControlCosts, saved_by_cfg
from ..sampler_run import SamplerRun
from ..step_by_step import StepByStep
from .planned import PlannedRun
from .steps import Steps

log = logging.getLogger(__name__)

SamplerLoop = Callable[[dict[str, Any], Any], Tensor]
"""ComfyUI's loop, with the wrappers of other packs around it, as a function of extra_args and the callback."""


def run_by_calls(run: SamplerRun, reason: NotSupported, planned: PlannedRun, steps: Steps, loop: SamplerLoop) -> Tensor:
    """Run the loop one model call at a time, report the reason, and return the loop's result.

    Raises:
        Refused: the result has NaN or infinite values.
    """
    log.info(
        "Parallel: slower path: one forward per model call on %s (choose %s for the fast one), because the workers' "
        "loop does not support %s",
        planned.where,
        reason.instead,
        reason,
    )
    steps.run.warnings.append(
        f"Slower path: one model call at a time, because the workers do not support {reason}. Choose {reason.instead} "
        "for the fast path."
    )
    if planned.plan.pipefusion > 1:
        idle_stages = (
            f"Only 1 of the {planned.plan.pipefusion} PipeFusion stages works at a time, because the workers get one model "
            "call at a time: choose pipefusion 1 in Parallel Plan."
        )
        log.info("Parallel: %s", idle_stages)
        steps.run.warnings.append(idle_stages)
    by_step = StepByStep(planned.plan, planned.working)
    options = by_step.model_options(run.extra_args["model_options"])
    samples = loop({**run.extra_args, "model_options": options}, steps.show)
    if by_step.unused:
        log.warning(
            "Parallel: the workers computed %d model calls that ComfyUI did not use, because it changed its calls within a "
            "step. The picture is right, but took longer",
            by_step.unused,
        )
    _tell_costs(by_step.costs, planned.plan, steps.run)
    dtype = run.guider.inner_model.get_dtype_inference()
    check_sampled(samples.cpu(), "After the last step", run.sigmas, dtype_name(dtype))
    return samples


def _tell_costs(costs: ControlCosts, plan: ResolvedPlan, run: NodeRun) -> None:
    """Log the cost of ControlNets, and warn on the node if the cost exceeds the time that the plan saves."""
    if not costs.forwards:
        return
    sending, saved = costs.sending(run.ran), saved_by_cfg(plan, run.planned)
    log.info("Parallel: %s", costs.in_words(run.steps, sending, saved))
    warning = costs.warning(run.steps, sending, saved)
    if warning is not None:
        run.warnings.append(warning)
