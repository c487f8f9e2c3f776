"""The denoise on one rank: the order of calls and patches, and the return of latents to the first stage.

Calls of the warm-up steps compute all tokens exactly and fill the caches. After them patches stream through the stages
(PipeFusion, arXiv 2405.14430). The first stage begins a patch's next call as soon as that patch's update has come back, so
the pipeline never drains between steps. With one stage and one patch, the same loop is the plain denoise. The number of
patches and of warm-up steps changes the result; the number of stages does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..errors import Cancelled
from ..mesh import Mesh
from ..models.inputs import PatchForward, Region
from ..transfers import to_device
from .model_calls import ModelCalls
from .patch_sampler import PatchSampler
from .program import CallInfo
from .prompts import Batch


@dataclass(frozen=True)
class Patch:
    """A part of the latent, or all of it, with its sampler."""

    region: Region
    sampler: PatchSampler


@dataclass(frozen=True)
class Callbacks:
    """The functions that a run calls while it goes on."""

    cancelled: CancelSignal
    """The cancel signal, read before each model call."""
    step_begins: Callable[[int], None]
    """Called with a step's number, from 0, when the step begins."""
    step_done: Callable[[int, Tensor, Tensor], None]
    """Called on the last stage with the step, the denoised latent and x, at each step event of the sampler."""


class Pipeline:
    """One run of a denoise on this rank.

    Args:
        mesh: this rank's communicators.
        model: the settings that all model calls share.
        calls: all model calls.
        patches: the patches of the latent with their samplers.
        latent: the whole latent at the start of the run.
        warmup_steps: the number of steps that compute all tokens before patches stream.
        callbacks: called on every rank, except `step_done`.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: ModelCalls,
        calls: Sequence[CallInfo],
        patches: Sequence[Patch],
        latent: Tensor,
        warmup_steps: int,
        callbacks: Callbacks,
    ) -> None:
        self._mesh = mesh
        self._model = model
        self._calls = calls
        self._patches = patches
        self._latent = latent.clone()
        self._warmup_steps = warmup_steps
        self._callbacks = callbacks
        self._latent_return = _LatentReturn(mesh.latent_return, [patch.region for patch in patches], latent)
        times = [model.process.timestep(call.sigma) for call in calls]
        self._timesteps = to_device(torch.stack(times), latent.device) if times else latent.new_empty(0)

    def run(self) -> Tensor | None:
        """Run all model calls. A collective.

        Returns:
            The final latent on the ranks of the last stage; None on the others.

        Raises:
            Cancelled: the user cancelled the run. All ranks raise it before the same model call.
        """
        for patch in self._patches if self._calls else ():
            patch.region.of(self._latent).copy_(patch.sampler.model_input)
        previous: tuple[int, ...] | None = None
        for index, call in enumerate(self._calls):
            batches = self._model.prompts.at(call.sigma)
            prompts = self._model.prompts.taking_part(call.sigma)
            whole = len(self._patches) == 1 or call.step < self._warmup_steps or prompts != previous
            previous = prompts
            numbers: Sequence[int | None] = [None] if whole else range(len(self._patches))
            for number in numbers:
                self._take_updates(index, number)
                if not number:
                    self._begin(call, whole)
                self._compute(index, call, batches, number)
        self._mesh.finish_sending()
        if not self._mesh.is_last_stage:
            return None
        return self._join([patch.sampler.result for patch in self._patches if patch.sampler.result is not None])

    def _take_updates(self, index: int, patch: int | None) -> None:
        """Copy the latents of this call into the whole latent, on the stages that read the latent.

        The first stage receives the latents. The last stage has them, because its samplers made them.
        """
        if not index or not self._mesh.reads_latent:
            return
        for number in self._numbers(patch):
            x = self._latent_return.take() if self._mesh.is_first_stage else self._patches[number].sampler.model_input
            self._patches[number].region.of(self._latent).copy_(x)

    def _begin(self, call: CallInfo, whole: bool) -> None:
        """Report the beginning of a step if the call opens one, and raise Cancelled on all ranks if the user has cancelled."""
        if call.opens_step:
            self._callbacks.step_begins(call.step)
        cancelled = self._callbacks.cancelled
        if cancelled.everywhere() if whole else cancelled.in_band(self._mesh):
            if not whole and self._mesh.is_first_stage:
                for _ in self._patches[1:]:
                    self._latent_return.take()  # these latents are on their way and must not meet the next request
            self._mesh.finish_sending()
            raise Cancelled

    def _compute(self, index: int, call: CallInfo, batches: Sequence[Batch], patch: int | None) -> None:
        outputs = self._model.outputs(
            index,
            batches,
            self._latent,
            call.sigma,
            self._timesteps[index],
            reads_latent=self._mesh.reads_latent,
            patch=patch,
            next_forward=lambda batch: self._next_forward(batches, batch, patch),
        )
        if self._mesh.is_last_stage:
            self._update(index, call, batches, patch, outputs)
        if self._mesh.is_first_stage and index + 1 < len(self._calls):
            for number in self._numbers(patch):
                self._latent_return.expect(number)

    def _update(
        self, index: int, call: CallInfo, batches: Sequence[Batch], patch: int | None, outputs: Sequence[Tensor | None]
    ) -> None:
        """Advance the samplers of the computed patches, on the last stage, and send back the latents of the next call."""
        for number in self._numbers(patch):
            region, sampler = self._patches[number].region, self._patches[number].sampler
            predicted = [out if patch is not None else region.of(out) for out in outputs if out is not None]
            sampler.advance(self._model.answer(sampler.model_input, call.sigma, batches, predicted))
            if index + 1 < len(self._calls):
                self._latent_return.put(number, sampler.model_input)
        if patch in (None, len(self._patches) - 1):
            for events in zip(*(sampled.sampler.take_events() for sampled in self._patches), strict=True):
                denoised, x = (self._join(parts) for parts in zip(*(sampled[1:] for sampled in events), strict=True))
                self._callbacks.step_done(events[0].step, denoised, x)

    def _next_forward(self, batches: Sequence[Batch], batch: Batch, patch: int | None) -> PatchForward | None:
        """Return the patch forward after a batch's own in this call; None at the end, as the next call may be cancelled."""
        if patch is None:
            return None
        keys = [each.key for each in batches]
        following = keys.index(batch.key) + 1
        if following < len(keys):
            return PatchForward(keys[following], patch)
        return PatchForward(keys[0], patch + 1) if patch + 1 < len(self._patches) else None

    def _numbers(self, patch: int | None) -> Sequence[int]:
        return range(len(self._patches)) if patch is None else [patch]

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=self._patches[0].region.dim)


class CancelSignal:
    """The user's cancel flag, as ranks learn it between model calls.

    Args:
        is_requested: returns True on a rank that knows that the user has cancelled.
        broadcast_flag: returns rank 0's flag on every rank. A collective.
    """

    def __init__(self, is_requested: Callable[[], bool], broadcast_flag: Callable[[bool], bool]) -> None:
        self._is_requested = is_requested
        self._broadcast_flag = broadcast_flag

    def everywhere(self) -> bool:
        """Broadcast the cancel flag from rank 0, before a call of all tokens. A collective of all ranks."""
        return self._broadcast_flag(self._is_requested())

    def in_band(self, mesh: Mesh) -> bool:
        """Pass the first stage's cancel flag from stage to stage, before the first patch of a call, and return the flag."""
        flag = mesh.cancel_flag
        if mesh.is_first_stage:
            requested = torch.full((1, 1, 1), float(self._is_requested()))
            cancelled = bool(mesh.stage.all_gather(requested, [1] * mesh.stage.size).any())
        else:
            cancelled = bool(flag.receive((1,), torch.uint8, flag.rank - 1))
        if not mesh.is_last_stage:
            flag.send(torch.tensor([cancelled], dtype=torch.uint8), flag.rank + 1)
        return cancelled


class _LatentReturn:
    """The return of updated patches from the last stage to the first; a local queue if there is one stage."""

    def __init__(self, axis: Communicator, patches: Sequence[Region], latent: Tensor) -> None:
        self._axis = axis
        self._shapes = [patch.of(latent).shape for patch in patches]
        self._queue: deque[Tensor] = deque()
        self._coming: deque[Callable[[], Tensor]] = deque()

    def put(self, number: int, x: Tensor) -> None:
        """Send the model's next input for a patch, on the last stage."""
        if self._axis.size == 1:
            self._queue.append(x)
        else:
            self._axis.send(x, 0, "latents")

    def expect(self, number: int) -> None:
        """Start to receive a patch, on the first stage. Patches are expected and taken in the order in which they are put."""
        if self._axis.size > 1:
            self._coming.append(self._axis.start_receive(self._shapes[number], torch.float32, self._axis.size - 1))

    def take(self) -> Tensor:
        """Wait for the next patch, on the first stage, and return it."""
        return self._queue.popleft() if self._axis.size == 1 else self._coming.popleft()()
