"""Run the whole denoise in the workers' own loop."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from ....parallel_backend.models.comfyui.content.replaced_functions import Kind
from ..conditioning import STRICT, NotSupported
from ..features.compile import compiler_of
from ..features.step_cache import KEY as STEP_CACHE
from ..features.step_cache import report_skipped
from ..recording.record import Recording
from ..sampler_run import SamplerRun
from ..supported import not_supported
from ..trials import NotKnown, verdicts
from .callbacks import changing_callbacks
from .checks import Checked
from .message import fields_of
from .planned import PlannedRun
from .side_by_side import sampling_results
from .steps import Steps

log = logging.getLogger(__name__)

Message = tuple[dict[str, Any], dict[str, Tensor]]
"""The fields and tensors of a SampleRequest."""


def message_of(run: SamplerRun, checked: Checked, recording: Recording, *, wrapped: bool) -> Message:
    """Return the request that makes the workers do the run.

    Args:
        run: the run.
        checked: the results of the checks.
        recording: the sampler's recording.
        wrapped: True if another wrapper is between this pack's and the sampler.

    Raises:
        NotSupported: the workers' loop cannot do the run; the message gives the reason.
    """
    if wrapped:
        raise NotSupported("another wrapper around the sampler")
    if unknown := not_supported(run.guider, run.sampler, run.model_options):
        raise NotSupported(unknown)
    refuse_unknown(run, recording)
    if checked.compared:
        raise NotSupported(checked.compared[0].node)
    fields, tensors = fields_of(run, recording)
    fields["compiler"] = fields["compiler"] or run.guider.inner_model.diffusion_model.remote.requested_plan.compiler
    if checked.adapters.networks:
        if compiler_of(run.model_options):
            raise NotSupported("compiled blocks with a model patch", "a graph without TorchCompileModel")
        fields["compiler"] = ""
    return fields, tensors


def refuse_unknown(run: SamplerRun, recording: Recording) -> None:
    """Check the functions of ComfyUI's that the workers' loop replaces in a run.

    Raises:
        NotKnown: a function is not from a tested ComfyUI, and differs from the workers' code.
    """
    holder = run.transformer_options.get(STEP_CACHE)
    takes_part: dict[Kind, bool] = {
        "sampler driver": True,
        "guidance": True,
        "mask": run.mask is not None,
        "noise sampler": recording.program is not None and bool(recording.program.sources),
        "step cache": holder is not None,
    }
    caches = sys.modules.get(type(holder).__module__)
    for kind in (kind for kind, here in takes_part.items() if here):
        if what := verdicts().mismatch(kind, functools.partial(sampling_results, kind, caches)):
            raise NotKnown(what)


def whole_picture_only(fields: Mapping[str, Any], recording: Recording) -> str | None:
    """Return the name of a part of the run that needs every step on the whole picture; None if there is none."""
    if fields["cache"] is not None:
        return str(fields["cache"].kind)
    if fields["guidance_functions"]:
        return str(fields["guidance_functions"][0].node)
    return None if recording.needed().shows_steps else f"the sampler {recording.name}, which reports no steps,"


def run_in_loop(
    run: SamplerRun, message: Message, recording: Recording, planned: PlannedRun, steps: Steps, *, bar_off: bool
) -> Tensor:
    """Do the run in the workers, and return the result of `Sampler.sample`.

    Raises:
        Refused: the run's callback changes latents.
    """
    (fields, tensors), sigmas, device = message, run.sigmas, run.noise.device
    cached = f", {fields['cache'].kind} (approximate)" if fields["cache"] is not None else ""
    compiled = f", blocks compiled by {fields['compiler']}" if fields["compiler"] else ""
    log.info("Parallel: %s in the workers on %s%s%s", recording.name, planned.where, cached, compiled)
    total = len(sigmas) - 1
    sigmas.copy_(recording.sigmas)  # the sampler's function may change sigmas: uni_pc writes to the last one
    with tqdm(total=total, disable=bar_off) as bar:
        strict = bool(run.transformer_options.get(STRICT))
        watched = changing_callbacks().watched(steps, device, strict=strict)

        def on_progress(step: int, denoised: Tensor, x: Tensor) -> None:
            bar.update(step + 1 - bar.n)
            watched.show(step, denoised, x, total)

        done = planned.remote.sample(
            tensors, on_progress, planned.adapters, plan=planned.plan, working_bytes=planned.working, **fields
        )
    for reason in done.message.uncompiled:
        log.warning("Parallel: %s", reason)
        steps.run.warnings.append(reason)
    report_skipped(run.transformer_options, done.message.skipped)
    samples = done.tensors["result"].to(device)
    return run.guider.inner_model.model_sampling.inverse_noise_scaling(sigmas[-1], samples)
