"""The SAMPLER_SAMPLE wrapper: the whole denoise in the workers where they support it, step by step where not."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from ....parallel_backend.errors import Refused
from ....parallel_backend.host.runs.finite import check_sampled
from ...progress import Run
from ...runtime import progress
from ..conditioning import STRICT, NotSupported, of_prompt
from ..features.attention_guidance import attention_guides, name_of, refuse_split
from ..features.networks import WHOLE, refuse_stages
from ..features.step_cache import tell_skipped
from ..own_code import not_supported
from ..proxy import DiffusionProxy
from ..recording.chosen import recording_of
from ..recording.record import Recording
from ..refusals import refuse_weights
from ..remote_model import RemoteModel, dtype_name
from ..sampler_run import SamplerRun
from ..step_by_step import StepByStep
from .message import example_of, fields_of, refuse_what_cannot_work
from .sides import two_sided
from .sigmas import refuse_guidance, refuse_sigmas, refuse_strengths

log = logging.getLogger(__name__)

OF_A_MASK = "set it from 0 to 1"

STAGES_IN_TURN = (
    "Each model call goes through PipeFusion's stages one after the other, so that one stage works at a time: choose "
    "pipefusion 1 for such a graph"
)

RUN_WHOLE = (
    "Z-Image's ControlNet runs whole on every GPU, which more GPUs do not make faster; the model itself is spread."
)


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
    """Stand in for `Sampler.sample`; returns its result.

    Raises:
        Refused: what the workers cannot do at all, or, on a strict MODEL, not in their own loop.
    """
    proxy = guider.inner_model.diffusion_model
    if not isinstance(proxy, DiffusionProxy):
        raise refuse_weights("Replacing the diffusion model")
    proxy.refuse_changes()
    remote: RemoteModel = proxy.remote
    assert latent_image is not None
    run = SamplerRun(executor.class_obj, guider, sigmas, extra_args, noise, latent_image, denoise_mask)
    refuse_what_cannot_work(run)
    refuse_strengths(guider)
    refuse_sigmas(sigmas, guider.inner_model.model_sampling)
    dtype = guider.inner_model.get_dtype_inference()
    attention = remote.attention(dtype)
    adapters = proxy.adapters(run.transformer_options, noise.shape)
    for entries in guider.conds.values():
        for entry in entries:
            given = of_prompt(entry["model_conds"], dtype)
            remote.check(noise, given)
            refuse_guidance(given.tensors)
            if isinstance(entry.get("mask"), Tensor):
                remote.check_numbers("mask of a prompt", entry["mask"], OF_A_MASK)
    remote.check_numbers("latent", latent_image)
    if denoise_mask is not None:
        remote.check_numbers("noise mask", denoise_mask, OF_A_MASK)
    compared = attention_guides(run.transformer_options)
    refuse_split(remote.wish, compared)
    if len(sigmas) < 2:  # no step, so there is nothing for the workers to do
        return executor(guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)
    recording = recording_of(run, remote.trials)
    reason = None
    try:
        if executor.idx + 1 < len(executor.wrappers):
            raise NotSupported("another wrapper around the sampler")
        if unknown := not_supported(guider, run.sampler, run.model_options):
            raise NotSupported(unknown)
        if compared:
            raise NotSupported(name_of(compared[0]))
        fields, tensors = fields_of(run, recording)
        if adapters.networks and fields["compiler"]:
            raise NotSupported("compiled blocks with a model patch", "a graph without TorchCompileModel")
    except NotSupported as error:
        reason = _taken(error, run)
    with progress().run("Step", steps=len(sigmas) - 1, first="Preparing") as told:
        example = example_of(run)
        job = remote.job(example, dtype, two_sided(run, recording.both_sides), len(sigmas) - 1)
        # of a call whose attentions compare its rows no worker can have some alone
        planned = replace(job, batch=1, two_sided=False) if compared else job
        plan = remote.plan(planned, example, dtype, fields["compiler"] if reason is None else "")
        if reason is None and max(plan.patches, plan.pipefusion) > 1 and (exact := _exact_only(fields, recording)):
            reason = _taken(NotSupported(f"{exact} with PipeFusion", "pipefusion 1 in Parallel Plan"), run)
        refuse_stages(plan, adapters.networks)
        if plan.world_size > 1 and any(network.kind == WHOLE for network in adapters.networks):
            told.warnings.append(RUN_WHOLE)
        working = remote.make_room(plan, job, adapters)
        where = f"{plan.describe()}, attention {attention}"
        if reason is not None:
            log.info(
                "Parallel: slower path: one forward per model call on %s (choose %s for the fast one), because the workers' "
                "loop does not support %s",
                where,
                reason.instead,
                reason,
            )
            told.warnings.append(
                f"Slower path: one model call at a time, because the workers do not support {reason}. Choose {reason.instead} "
                "for the fast path."
            )
            if plan.pipefusion > 1:
                log.info("Parallel: %s", STAGES_IN_TURN)
                told.warnings.append(f"{STAGES_IN_TURN}.")
            options = StepByStep(plan, working).model_options(extra_args["model_options"])
            arguments = {**extra_args, "model_options": options}
            tell = functools.partial(_tell_step, told, callback)
            samples = executor(guider, sigmas, arguments, tell, noise, latent_image, denoise_mask, disable_pbar)
            check_sampled(samples.cpu(), "After the last step", sigmas, dtype_name(dtype))
            return samples
        cached = f", {fields['cache'].kind} (approximate)" if fields["cache"] is not None else ""
        compiled = f", blocks compiled by {fields['compiler']}" if fields["compiler"] else ""
        log.info("Parallel: %s in the workers on %s%s%s", recording.name, where, cached, compiled)
        total = len(sigmas) - 1
        sigmas.copy_(recording.sigmas)  # as the sampler's function leaves them: uni_pc writes to the last one
        with tqdm(total=total, disable=disable_pbar) as bar:

            def on_progress(step: int, denoised: Tensor, x: Tensor) -> None:
                bar.update(step + 1 - bar.n)
                _tell_step(told, callback, step, denoised.to(noise.device), x.to(noise.device), total)

            done = remote.sample(tensors, on_progress, adapters, plan=plan, working=working, **fields)
        for reason in done.message.uncompiled:
            log.warning("Parallel: %s", reason)
            told.warnings.append(reason)
    tell_skipped(run.transformer_options, done.message.skipped)
    samples = done.tensors["result"]
    return guider.inner_model.model_sampling.inverse_noise_scaling(sigmas[-1], samples.to(noise.device))


def _exact_only(fields: Mapping[str, Any], recording: Recording) -> str | None:
    """What of a run needs every step to be of the whole picture; None if nothing does."""
    if fields["cache"] is not None:
        return str(fields["cache"].kind)
    if fields["guides"]:
        return str(fields["guides"][0].function.partition(".")[0])
    return None if recording.needed().tells else f"the sampler {recording.name}, which tells no steps,"


def _taken(reason: NotSupported, run: SamplerRun) -> NotSupported:
    """The reason why a run goes one forward at a time. Raises Refused on a strict MODEL."""
    if run.transformer_options.get(STRICT):
        raise Refused(
            f"Parallel Sampler does not support {reason}: choose {reason.instead}, or KSampler, which is slower (one model "
            "call at a time)."
        ) from None
    return reason


def _tell_step(told: Run, callback: Any, step: int, *rest: Any) -> None:
    told.step(step + 1)
    if callback is not None:
        callback(step, *rest)
