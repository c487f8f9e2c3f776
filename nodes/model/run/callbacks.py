"""Callbacks that change the latents they receive. Only ComfyUI's own loop continues with the changed latents."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ....parallel_backend.errors import Refused
from ..conditioning import NotSupported
from ..own_code import name_of, own
from .steps import Steps

WITH_KSAMPLER = "use KSampler instead of Parallel Sampler"
STEPS_BACK = 4
"""Number of steps whose latents are compared: the present step and the earlier ones that ComfyUI's multistep samplers use."""

QUEUED_AGAIN = "queue the prompt again to run one model call at a time, where the change takes effect"


class ChangingCallbacks:
    """The callbacks that have changed a latent in a run of the workers' loop.

    Packs make a callback anew for each run. A callback is therefore known by its code and by the strings and booleans in its
    closure, arguments and defaults.
    """

    def __init__(self) -> None:
        self._known: set[object] = set()

    def refuse(self, callback: Any) -> None:
        """Raise NotSupported for a callback that has changed a latent before."""
        if callback is not None and _kind(callback) in self._known:
            raise NotSupported(f"the callback {name_of(_innermost(callback))}, which changes latents")

    def watched(self, steps: Steps, device: torch.device, *, strict: bool) -> WatchedSteps:
        """Return an object that shows a run's steps and checks the latents after each call of the callback.

        Args:
            steps: the steps of the run.
            device: the device of the callback's latents.
            strict: True if the MODEL refuses single model calls.
        """
        kind = None if steps.callback is None else _kind(steps.callback)  # before the callback changes its closure
        return WatchedSteps(
            steps, device, functools.partial(self._known.add, kind), WITH_KSAMPLER if strict else QUEUED_AGAIN
        )


class WatchedSteps:
    """The steps of one run in the workers' loop. Its callback gets copies of the latents.

    Args:
        steps: the steps.
        device: the device of the copies.
        remember: is called if the callback has changed a copy.
        way_out: advice to the user in that case.
    """

    def __init__(self, steps: Steps, device: torch.device, remember: Callable[[], None], way_out: str) -> None:
        self._steps, self._device = steps, device
        self._remember, self._way_out = remember, way_out
        self._history: deque[_CallbackLatent] = deque(maxlen=2 * STEPS_BACK)

    def show(self, step: int, denoised: Tensor, x: Tensor, total: int) -> None:
        """Show a step, counted from 0, with its latents on the CPU.

        Raises:
            Refused: the callback has changed a latent.
        """
        if self._steps.callback is None:
            self._steps.show(step)
            return
        copies = [tensor.to(self._device, copy=True) for tensor in (denoised, x)]
        for name, received, copy in zip(("x0", "x"), (denoised, x), copies, strict=True):
            self._history.append(_CallbackLatent(name, step, received, weakref.ref(copy)))
        self._steps.show(step, *copies, total)
        for entry in self._history:
            if entry.changed:
                self._remember()
                raise Refused(
                    f"The callback {name_of(_innermost(self._steps.callback))} changed {entry.name} of step {entry.step + 1} of "
                    f"{total}, and the workers' loop cannot use the changed latent: {self._way_out}."
                )


@dataclass
class _CallbackLatent:
    """A latent, with its name and step, and a weak reference to the copy that a callback got.

    The copy no longer exists unless the callback keeps it.
    """

    name: str
    step: int
    received: Tensor
    copy: weakref.ref[Tensor]

    @property
    def changed(self) -> bool:
        copy = self.copy()
        return copy is not None and not torch.equal(copy.to(self.received.device), self.received)


@functools.cache
def changing_callbacks() -> ChangingCallbacks:
    """Return the changing callbacks of this process."""
    return ChangingCallbacks()


def _innermost(callback: Any) -> Any:
    """Return the user's callback, without the function that ComfyUI wraps around it for packed latents."""
    while own(callback):
        inner = next((value for value in _closure_values(callback) if callable(value)), None)
        if inner is None:
            return callback
        callback = inner
    return callback


def _closure_values(function: Any) -> Iterator[Any]:
    """Yield the values in a function's closure."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _kind(callback: Any) -> object:
    """Return a key for a callback: its code, and the bool and str values among its arguments, closure and defaults."""
    values: list[Any] = []
    callback = _innermost(callback)
    while isinstance(callback, functools.partial):
        values += [*callback.args, *callback.keywords.values()]
        callback = callback.func
    if isinstance(callback, MethodType):
        callback = callback.__func__
    elif not hasattr(callback, "__code__"):
        callback = type(callback).__call__
    values += _closure_values(callback)
    values += getattr(callback, "__defaults__", None) or ()
    return getattr(callback, "__code__", callback), tuple(value for value in values if isinstance(value, bool | str))
