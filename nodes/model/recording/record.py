"""Turn a run's SAMPLER into the program that workers replay, or into the reason why ComfyUI's own loop does the run."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import comfy.model_management
import comfy.samplers
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....parallel_backend.denoise.program import Program, encoded
from ....parallel_backend.errors import Refused
from ....parallel_backend.snapshot import Generators, StateSnapshot
from ..conditioning import NotSupported
from ..sampler_run import SamplerRun
from .function_state import FunctionStateSnapshot
from .latent import Recorded, number_of, spoilt, value_of
from .noise import recorded_noise
from .recording_model import RecordingModel, no_network, recorded_answers
from .rules import RecordingRules
from .tape import Cell, NotRecordable, Tape

OTHER_SAMPLER = "another sampler, such as euler or dpmpp_2m"
"""Advice for a sampler that the workers do not run."""

ONE_AT_A_TIME = threading.RLock()
"""A lock for recording, which changes state of the entire process (random generators, the compiler's stance)."""


@dataclass(frozen=True)
class Recording:
    """The outcome of recording a sampler's function.

    Attributes:
        name: the sampler's name for the user.
        program: the program; None if the workers cannot replay the function.
        reason: the reason why there is no program.
        reads_both_branches: True if the function reads both prompts whatever the cfg, up to the point that recording reached.
        sigmas: the sigmas that the function got, with its changes to them.
    """

    name: str
    program: Program | None
    reason: str
    reads_both_branches: bool
    sigmas: Tensor

    def needed(self) -> Program:
        """Return the program.

        Raises:
            NotSupported: there is none.
        """
        if self.program is None:
            raise NotSupported(self.reason, OTHER_SAMPLER)
        return self.program


def name_of(function: Any) -> str:
    """Return the user's name for a sampler's function. Compare code, as ComfyUI makes some functions anew at each call."""
    code = _code(function)
    for name in comfy.samplers.SAMPLER_NAMES:
        if code is not None and _code(comfy.samplers.sampler_object(name).sampler_function) is code:
            return str(name)
    return str(getattr(function, "__name__", type(function).__name__)).removeprefix("sample_")


def _code(function: Any) -> Any:
    return getattr(inspect.unwrap(function), "__code__", None)


def recorded(run: SamplerRun) -> Recording:
    """Run a KSAMPLER's function on a latent without data, and undo all side effects.

    Raises:
        Refused: the function itself refuses with a sentence for the user.
    """
    with ONE_AT_A_TIME:
        generators = Generators()
        recording = _recorded(run, generators)
        if recording.program is None or not generators.moved:
            return recording
        with generators.another_state() as reseeded:
            again = _recorded(run, reseeded)
        same = again.program is not None and torch.equal(encoded(again.program), encoded(recording.program))
        if same and generators.seeded_like(reseeded):
            return recording
        return without_program(recording, "draws random numbers itself")


def without_program(recording: Recording, clause: str) -> Recording:
    """Return the recording without its program. The clause completes "the sampler …, which"."""
    return replace(recording, program=None, reason=_reason(recording.name, clause))


def _recorded(run: SamplerRun, generators: Generators) -> Recording:
    function = run.sampler.sampler_function
    name = name_of(function)
    with torch.inference_mode(False), torch.no_grad(), no_network(run.guider), recorded_noise(function), _eager():
        sigmas = run.sigmas.detach().to("cpu", copy=True)
        tape = Tape(run.noise.shape, run.noise.dtype, len(sigmas), RecordingRules())
        masked = spoilt(tape, "uses the mask") if run.mask is not None else None
        extra_args = {**run.extra_args, "denoise_mask": masked}
        fixed = StateSnapshot(fixed_of(run))
        recorder = RecordingModel(
            run.guider, sigmas, extra_args, fixed, recorded_answers(tape, run.guider, masked is not None)
        )
        recorder.noise = spoilt(tape, "uses the initial noise")
        recorder.latent_image = spoilt(tape, "uses the latent without its initial noise")
        recorder.denoise_mask = masked
        program, clause = None, ""
        try:
            with without_side_effects(run, fixed, generators) as options, _Watched(tape):
                x = Recorded(tape, Cell(0), tape.shape, tape.dtype)
                result = call(function, recorder, x, sigmas, extra_args, _callback(tape), options)
                program = tape.program(name, value_of(result, "returns"))
        except (comfy.model_management.InterruptProcessingException, Refused):
            raise
        except NotRecordable as refusal:
            clause = refusal.clause
        except Exception as error:
            clause = f"raises {type(error).__name__} on a latent without data"
        if tape.refused is not None:
            clause = tape.refused.clause
    reason = _reason(name, clause) if clause else ""
    return Recording(name, None if clause else program, reason, bool(recorder.reads_both_branches), sigmas)


def _reason(name: str, clause: str) -> str:
    return f"the sampler {name}, which {clause}"


def fixed_of(run: SamplerRun) -> list[Any]:
    """Return the state that must be the same at every model call as at the beginning."""
    model = run.guider.inner_model
    return [vars(run.guider), vars(model), vars(model.model_sampling), run.model_options]


@contextlib.contextmanager
def without_side_effects(run: SamplerRun, fixed: StateSnapshot, generators: Generators) -> Iterator[Mapping[str, Any]]:
    """Provide copies of the options for a call of the run's function inside this context. Restore all state at the end.

    Args:
        run: the run.
        fixed: a snapshot of the state that must not change.
        generators: the states of the random generators now.

    Raises:
        NotRecordable: an option cannot be copied, or the function has changed state that outlives the call.
    """
    try:
        options = copied_options(run)
    except Exception:
        raise NotRecordable("has an option that cannot be copied") from None
    memory = FunctionStateSnapshot(memories(run.sampler.sampler_function, options))
    try:
        yield options
        if memory.changed:
            raise NotRecordable("keeps state between runs")
        if fixed.changed:
            raise NotRecordable("changes the guider or the model")
    finally:
        for state in (memory, fixed, generators):
            state.restore()


def options_of(run: SamplerRun) -> Mapping[str, Any]:
    """Return the options that a node gives a sampler's function."""
    return run.sampler.extra_options  # type: ignore[no-any-return]


def copied_options(run: SamplerRun) -> dict[str, Any]:
    """Return deep copies of the options, because the function may change the objects in them."""
    return {name: copy.deepcopy(value) for name, value in options_of(run).items()}


def memories(function: Any, options: Mapping[str, Any]) -> list[Any]:
    """Return the objects in which a function and its arguments may keep state from earlier calls."""
    containers: list[Any] = [options]
    for value in (function, *options.values()):
        if isinstance(value, functools.partial):
            containers += memories(value.func, value.keywords)
        elif isinstance(value, FunctionType | MethodType):
            containers.append(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type | Tensor):
            containers += [vars(value), value]
    return containers


def call(
    function: Callable[..., Any],
    model: Any,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Mapping[str, Any],
    callback: Callable[..., None],
    options: Mapping[str, Any],
) -> Any:
    """Call a sampler's function with the arguments that KSAMPLER passes."""
    return function(model, x, sigmas, extra_args=dict(extra_args), callback=callback, disable=True, **options)


def _callback(tape: Tape) -> Callable[[Mapping[str, Any]], None]:
    def callback(event: Mapping[str, Any]) -> None:
        step = number_of(event["i"])
        if not isinstance(step, int) or not 0 <= step < 2**31:
            raise tape.refuse("reports a step number that is not an integer of at least 0")
        tape.show(step, value_of(event["x"], "reports"), value_of(event["denoised"], "reports"))

    return callback


class _Watched(TorchFunctionMode):
    """A torch function mode that checks the time limit at each call."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._tape.look()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled helpers as plain Python inside this context. Without an imported compiler there are none."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
