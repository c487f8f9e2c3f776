"""The model that a sampler function calls while it is recorded: the run's own guider with checked calls, without a network."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.samplers
from torch import Tensor

from ....parallel_backend.snapshot import StateSnapshot
from ..features.node_functions import GUIDANCE
from .latent import Recorded, number_of, spoilt, value_of
from .tape import Cell, NotRecordable, Tape

KEEPS_NEGATIVE = "disable_cfg1_optimization"
"""The model option of nodes that use the negative prompt also at cfg 1."""

Hooks = Sequence[Callable[[dict[str, Any]], Any]]
"""Functions that a sampler function has added after the guidance."""

Answering = Callable[[Any, Any, Mapping[str, Any], Hooks], Any]
"""A function that returns the denoised latent for x, sigma, the model options and the sampler function's hooks."""


class RecordingModel(comfy.samplers.KSamplerX0Inpaint):  # type: ignore[misc]
    """The model that a sampler function calls.

    Args:
        guider: the run's guider.
        sigmas: the run's sigmas.
        extra_args: the arguments that the function must pass on at each call.
        snapshot: the state at the beginning of the run, which must not change.
        answering: computes the model's output.
    """

    def __init__(
        self, guider: Any, sigmas: Tensor, extra_args: Mapping[str, Any], snapshot: StateSnapshot, answering: Answering
    ) -> None:
        super().__init__(guider, sigmas)
        self._arguments = dict(extra_args)
        self._snapshot = snapshot
        self._answering = answering
        self.reads_both_branches: bool | None = None
        """True if the function reads both prompts whatever the cfg; None before its first model call."""

    def __call__(self, x: Any, sigma: Any, **extra_args: Any) -> Any:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if self._snapshot.changed:
            raise NotRecordable("changes the guider or the model's options during the run")
        if set(extra_args) != set(self._arguments):
            raise NotRecordable("passes the model different arguments than it received")
        for name, value in extra_args.items():
            if name != "model_options" and not _same_values(value, self._arguments[name]):
                raise NotRecordable(f"passes the model a different {name}")
        options = extra_args["model_options"]
        hooks = self._hooks(options)
        asks = bool(options.get(KEEPS_NEGATIVE, False))
        if self.reads_both_branches not in (None, asks):
            raise NotRecordable("reads both prompts in only some of its model calls")
        self.reads_both_branches = asks
        return self._answering(x, sigma, options, hooks)

    def _hooks(self, options: Mapping[str, Any]) -> Hooks:
        own = self._arguments["model_options"]
        changed = {
            name
            for name in {*own, *options} - {GUIDANCE, KEEPS_NEGATIVE}
            if name not in own or name not in options or not _same_values(options[name], own[name])
        }
        if changed:
            raise NotRecordable(f"changes the model option {min(changed)}")
        before, now = own.get(GUIDANCE, []), list(options.get(GUIDANCE, []))
        if len(now) < len(before) or any(new is not old for new, old in zip(now, before, strict=False)):
            raise NotRecordable(f"changes the model option {GUIDANCE}")
        if own.get(KEEPS_NEGATIVE, False) and not options.get(KEEPS_NEGATIVE, False):
            raise NotRecordable(f"changes the model option {KEEPS_NEGATIVE}")
        return now[len(before) :]


def _same_values(first: Any, second: Any) -> bool:
    """Return True if two values are identical, or equal collections and plain values."""
    if first is second:
        return True
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same_values(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(_same_values, first, second))
    return isinstance(first, bool | int | float | str) and type(first) is type(second) and first == second


def recorded_answers(tape: Tape, guider: Any, masked: bool) -> Answering:
    """Return a function that records model calls in a program. `masked` is true for a run with a mask around the model."""

    def answer(x: Any, sigma: Any, options: Mapping[str, Any], hooks: Hooks) -> Recorded:
        tape.look()
        level = number_of(sigma) if isinstance(sigma, Tensor) and tuple(sigma.shape) == tape.shape[:1] else None
        if level is None:
            raise tape.refuse("passes the model a sigma that differs between pictures, or was computed from the latent")
        seen = value_of(x, "passes the model")
        first = tape.call(seen, float(level), both_branches=bool(hooks))

        def latent(number: int) -> Recorded:
            return Recorded(tape, Cell(tape.cast(number, tape.dtype, x.dtype)), tape.shape, x.dtype)

        denoised = latent(first)
        if hooks:
            reason = "uses the latent inside the mask" if masked else ""
            arguments = arguments_of_hook(guider, options, sigma) | {
                "denoised": spoilt(tape, reason, dtype=x.dtype) if masked else denoised,
                "cond_denoised": latent(first + 1),
                "uncond_denoised": latent(first + 2),
                "input": spoilt(tape, reason, dtype=x.dtype) if masked else latent(seen),
            }
            call_hooks(hooks, arguments)
        return denoised

    return answer


def call_hooks(hooks: Hooks, arguments: dict[str, Any]) -> None:
    """Call the functions after the guidance. Raise NotRecordable if one of them changes the denoised latent."""
    denoised = arguments["denoised"]
    before = _state(denoised)
    for hook in hooks:
        if hook(dict(arguments)) is not denoised or _state(denoised) != before:
            raise NotRecordable("changes the result of the guidance")


def _state(denoised: Any) -> object:
    return denoised.cell.value if isinstance(denoised, Recorded) else None


def cfg_of(guider: Any) -> float:
    """Return a guider's cfg, or 1. A guider with its scale in another attribute does not run in the workers' loop."""
    return float(getattr(guider, "cfg", 1.0))


def arguments_of_hook(guider: Any, options: Mapping[str, Any], sigma: Any) -> dict[str, Any]:
    """Return the arguments of a function after the guidance, without the latents."""
    cfg = cfg_of(guider)
    unused = math.isclose(cfg, 1.0) and not options.get(KEEPS_NEGATIVE, False)
    return {
        "cond": guider.conds.get("positive"),
        "uncond": None if unused else guider.conds.get("negative"),
        "cond_scale": cfg,
        "model": guider.inner_model,
        "sigma": sigma,
        "model_options": options,
    }


@contextlib.contextmanager
def no_network(guider: Any) -> Iterator[None]:
    """Refuse calls of the model or the guider that bypass RecordingModel, inside this context."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotRecordable("calls the network directly instead of the model that it received")

    model = guider.inner_model
    closed = [
        *((vars(guider), name) for name in ("outer_predict_noise", "predict_noise")),
        *((vars(model), name) for name in ("apply_model", "_apply_model")),
        (vars(model.diffusion_model), "forward"),
    ]
    before = [(names, name, names.get(name)) for names, name in closed]
    for names, name in closed:
        names[name] = refuse
    try:
        yield
    finally:
        for names, name, value in before:
            if value is None:
                names.pop(name, None)
            else:
                names[name] = value
