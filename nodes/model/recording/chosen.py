"""The outcome of recording a run's SAMPLER: a program for the workers, or a reason why there is none."""

from __future__ import annotations

import comfy.samplers
import torch

from ....parallel_backend.denoise.program import Program, encoded
from ....parallel_backend.denoise.replay import script_of
from ....parallel_backend.errors import Refused
from ..own_code import is_own_sampler
from ..sampler_run import SamplerRun
from ..trials import FunctionVerdicts
from .record import Recording, options_of, recorded, without_program
from .trial import clause_of


def recording_of(run: SamplerRun, verdicts: FunctionVerdicts) -> Recording:
    """Record a sampler, and try the program if the sampler is not ComfyUI's.

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
        return _without(run, "a sampler with additional arguments")
    recording = recorded(run)
    if recording.program is None:
        return recording
    reason = _refused_by_workers(recording.program, run)
    if not reason and not is_own_sampler(function, options_of(run)):
        reason = clause_of(run, verdicts)
    return without_program(recording, reason) if reason else recording


def _refused_by_workers(program: Program, run: SamplerRun) -> str:
    """Return the reason why workers would refuse a program, as a clause after "which"; empty if they accept it.

    This is the same check as in the workers.
    """
    try:
        script_of(encoded(program), run.noise.ndim, len(run.sigmas), torch.device("cpu"))
    except (Refused, OverflowError):
        return "uses operations that the workers cannot replay"
    return ""


def _without(run: SamplerRun, reason: str) -> Recording:
    return Recording(reason, None, reason, False, run.sigmas)
