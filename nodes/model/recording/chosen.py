"""What becomes of a run's SAMPLER: a program for the workers, or a reason."""

from __future__ import annotations

from dataclasses import replace

import comfy.samplers

from ..sampler_run import SamplerRun
from .known import is_comfyuis
from .record import Recording, name_of, options_of, recorded
from .trial import Trials


def recording_of(run: SamplerRun, trials: Trials) -> Recording:
    """Record a sampler, and try it if it is not ComfyUI's.

    Raises:
        Refused: the sampler itself refuses with a sentence for the user.
    """
    sampler = run.sampler
    if type(sampler) is not comfy.samplers.KSAMPLER:
        return _without(run, f"the sampler {type(sampler).__name__}")
    function = sampler.sampler_function
    if set(sampler.inpaint_options) - {"random"}:
        return _without(run, "a sampler with inpaint options")
    if set(run.extra_args) != {"model_options", "seed"} or run.extra_args["seed"] is None:
        return _without(run, "a sampler with arguments of its own")
    recording = recorded(run)
    if recording.program is None or is_comfyuis(function, options_of(run)):
        return recording
    word = trials.word(run)
    if not word:
        return recording
    return replace(recording, program=None, reason=f"the sampler {name_of(function)}, which {word}")


def _without(run: SamplerRun, reason: str) -> Recording:
    return Recording(reason, None, reason, False, run.sigmas)
