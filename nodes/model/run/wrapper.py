"""The SAMPLER_SAMPLE wrapper. The workers do the whole denoise if their loop supports it, and single model calls if not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ....parallel_backend.attention.kernels import describe
from ....parallel_backend.conditioning import ALONE
from ....parallel_backend.errors import Refused
from ...runtime import progress
from ..conditioning import STRICT, NotSupported
from ..features.feature import refuse_plan
from ..features.feature_list import IN_THE_LOOP
from ..features.networks import UNSHARDED, refuse_stages
from ..own_code import name_of
from ..proxy import DiffusionProxy
from ..recording.chosen import recording_of
from ..refusals import refuse_weights
from ..sampler_run import SamplerRun
from ..trials import NotKnown, verdicts
from .branches import has_uncond
from .callbacks import changing_callbacks
from .checks import Checked, check_run
from .loop import message_of, run_in_loop, whole_picture_only
from .message import calls_of, example_of, features_of
from .planned import PlannedRun
from .single_calls import run_by_calls
from .steps import Steps

ROWS_MEET = "a model whose rows of a batch depend on one another"

NOT_COMPILED = "The blocks are not compiled: compile on has no effect on single model calls or with model patches."

RUN_UNSHARDED = "Every GPU computes all of Z-Image's ControlNet, so more GPUs make only the model itself faster."


def run_in_workers(
    executor: Any,
    guider: Any,
    sigmas: Tensor,
    extra_args: dict[str, Any],
    callback: Any,
    noise: Tensor,
    latent_image: Tensor | None = None,
    denoise_mask: Tensor | None = None,
    disable_pbar: bool = False,
) -> Tensor:
    """Do the work of `Sampler.sample` in the workers, and return its result.

    Raises:
        Refused: the workers cannot do the run at all, or, on a strict MODEL, not in their own loop.
    """
    proxy = guider.inner_model.diffusion_model
    if not isinstance(proxy, DiffusionProxy):
        raise refuse_weights("Replacing the diffusion model")
    proxy.run_by(guider.inner_model)
    proxy.refuse_changes()
    assert latent_image is not None
    run = SamplerRun(executor.class_obj, guider, sigmas, extra_args, noise, latent_image, denoise_mask)
    notes = proxy.choose(run)
    checked = check_run(run, proxy)

    def loop(arguments: dict[str, Any], on_step: Any) -> Tensor:
        return executor(guider, sigmas, arguments, on_step, noise, latent_image, denoise_mask, disable_pbar)

    if len(sigmas) < 2:  # no step, so no work for the workers
        return loop(extra_args, callback)
    recording = recording_of(run, proxy.remote.verdicts)
    message, reason = None, None
    try:
        changing_callbacks().refuse(callback)
        message = message_of(run, checked, recording, wrapped=executor.idx + 1 < len(executor.wrappers))
    except NotSupported as error:
        reason = _accepted(error, run, checked)
    compiler = "" if message is None else message[0]["compiler"]
    with progress().run("Step", steps=len(sigmas) - 1, first="Preparing") as node_progress:
        remote, networks, steps = proxy.remote, checked.adapters.networks, Steps(node_progress, callback)
        node_progress.warnings.extend((*notes, *checked.adapters.left_out))
        node_progress.warnings.extend(proxy.prove(calls_of(guider)))
        if proxy.remote is not remote:  # the checks above were for the parallelised model
            return run_in_workers(
                executor, guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar
            )
        if remote.unsharded_reason:
            node_progress.warnings.append(remote.unsharded_reason)
        example, dtype = example_of(run), guider.inner_model.get_dtype_inference()
        job = remote.job(example, dtype, has_uncond(run, recording.reads_both_branches), len(sigmas) - 1)
        # if a call's rows change one another, no worker can compute only some of them
        planned_for = replace(job, batch=1, has_uncond=False) if checked.coupling else job
        plan = remote.plan(planned_for, example, dtype, compiler, all_tokens=checked.overridden)
        if message is not None and ALONE not in example.values and remote.backend.couples_rows(remote.spec):
            reason = _accepted(NotSupported(ROWS_MEET, "another model"), run, checked)
        if message is not None and plan.uses_pipefusion:
            whole = whole_picture_only(message[0], recording)
            if whole is not None:
                reason = _accepted(
                    NotSupported(f"{whole} with PipeFusion", "pipefusion 1 in Parallel Plan"), run, checked
                )
        if isinstance(reason, NotKnown) and plan.pipefusion > 1:
            raise Refused(
                f"The workers' loop does not support {reason}, and with one model call at a time only 1 of the "
                f"{plan.pipefusion} PipeFusion stages works: choose pipefusion 1 in Parallel Plan, or {reason.instead}."
            )
        node_progress.warnings.extend(verdicts().reports())
        refuse_stages(plan, networks)
        refuse_plan(IN_THE_LOOP, features_of(run), plan)
        if plan.world_size > 1 and any(network.kind == UNSHARDED for network in networks):
            node_progress.warnings.append(RUN_UNSHARDED)
        if remote.requested_plan.compiler and (reason is not None or not compiler):
            node_progress.warnings.append(NOT_COMPILED)
        working = remote.free_memory(plan, job, checked.adapters)
        planned = PlannedRun(
            remote, plan, checked.adapters, working, f"{describe(plan)}, attention {checked.attention}"
        )
        if reason is not None:
            return run_by_calls(run, reason, planned, steps, loop)
        assert message is not None
        result = run_in_loop(run, message, recording, planned, steps, bar_off=disable_pbar)
    proxy.refuse_changes()  # callbacks may have changed the model between steps
    return result


def _accepted(reason: NotSupported, run: SamplerRun, checked: Checked) -> NotSupported:
    """Return the reason why a run makes single model calls.

    Raises:
        Refused: the run cannot go on in that way.
    """
    if checked.injected is not None:
        raise Refused(
            f"a node's attention function ({name_of(checked.injected)}) keeps state between steps and needs the workers' loop, "
            f"which does not support {reason}: choose {reason.instead}, or remove that node."
        )
    if run.transformer_options.get(STRICT):
        raise Refused(
            f"Parallel Sampler does not support {reason}: choose {reason.instead}, or KSampler, which is slower (one model "
            "call at a time)."
        ) from None
    return reason
