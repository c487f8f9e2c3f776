"""Step caches: model calls that are answered by what the last computed one did (approximate).

The rule is that of ComfyUI's EasyCache and LazyCache nodes, with its order of operations and its rounding, so that the same
calls are skipped. It compares means over the whole batch. Each group of ranks adds up its part of it, the groups' sums are
exchanged, and of what follows rank 0's word counts, so that all ranks take the same branch on any mixture of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..diffusion import CacheSettings
from ..mesh import Mesh
from .prompts import Batch, Prompts

CONCAT = "concat"
"""The conditioning that is joined to the latent before the model sees it."""

BroadcastFlag = Callable[[bool], bool]
"""Returns rank 0's flag on every rank. A collective."""

Run = Callable[[Sequence[Batch]], list[Tensor | None]]
"""The model's outputs for batches of prompts: all of a call at once, and for none too, as other ranks may have some."""


Combine = Callable[..., Tensor]
"""The guidance of a call's outputs; only `moved` (see `Guidance.averages`) is left to be given."""


class StepCache(Protocol):
    """Stands around the model calls of a denoise; `skipped` counts those that were not computed."""

    skipped: int

    def outputs(
        self, sigma: Tensor, x: Tensor, latent: Tensor | None, batches: Sequence[Batch], run: Run
    ) -> list[Tensor | None]:
        """The outputs of a call's batches.

        Args:
            sigma: 0-dim fp32 on the CPU.
            x: the sampler's latent, fp32.
            latent: as the model is to see it, in the compute dtype; None on all stages but the first.
        """

    def denoised(self, sigma: Tensor, x: Tensor, combine: Combine) -> Tensor:
        """The call's denoised latent, which `combine` makes of its outputs."""


class EveryCall:
    """No cache: every call is computed."""

    skipped = 0

    def outputs(
        self, sigma: Tensor, x: Tensor, latent: Tensor | None, batches: Sequence[Batch], run: Run
    ) -> list[Tensor | None]:
        """The outputs of all batches, computed."""
        return run(batches)

    def denoised(self, sigma: Tensor, x: Tensor, combine: Combine) -> Tensor:
        """What the guidance makes of them."""
        return combine()


class EasyCache:
    """Keeps for each prompt what the model added to its input. All prompts of a call follow the first one's decision."""

    def __init__(self, settings: CacheSettings, prompts: Prompts, mesh: Mesh, broadcast_flag: BroadcastFlag) -> None:
        self.skipped = 0
        self._settings = settings
        self._prompts = prompts
        self._change = _Change(settings, (mesh.data,), (mesh.cfg, mesh.data), broadcast_flag)
        self._first: int | None = None
        self._known: set[int] = set()
        self._added: dict[int, Tensor] = {}
        self._moved: dict[int, Tensor] = {}

    def outputs(
        self, sigma: Tensor, x: Tensor, latent: Tensor | None, batches: Sequence[Batch], run: Run
    ) -> list[Tensor | None]:
        """The input and what was added to it last, for prompts that are skipped."""
        assert latent is not None, "there is one stage"
        self._moved = {}
        if not sigma > self._settings.end:
            return run(batches)
        self._change.begin()
        groups = self._prompts.groups(sigma)
        skipped = self._to_skip(groups, latent) if sigma <= self._settings.start and groups else set()
        self.skipped += self._first in skipped
        outputs: list[Tensor | None] = []
        fresh: dict[int, Tensor] = {}
        computed = iter(run([batch for batch in batches if not skipped.issuperset(batch.key)]))
        for batch in batches:
            if skipped.issuperset(batch.key):
                reused = {number: (latent + self._added[number]).to(latent.dtype) for number in batch.key}
                outputs.append(torch.cat([*reused.values()]))
                if latent is x and CONCAT not in batch.conditioning:
                    # ComfyUI's node adds in place: where nothing was cast or joined, the output is then taken from that.
                    self._moved |= reused
                continue
            output = next(computed)
            assert output is not None
            fresh |= zip(batch.key, output.chunk(len(batch.key)), strict=True)
            outputs.append(output)
        self._added |= {number: output - latent for number, output in fresh.items()}
        self._known |= {number for group in groups for number in group} - skipped
        for group in groups:
            if self._first in group and self._first not in skipped:
                of_first = [fresh[number] for number in group if number == self._first and number in fresh]
                self._change.learn(latent, of_first, [fresh[number] for number in group if number in fresh])
        return outputs

    def denoised(self, sigma: Tensor, x: Tensor, combine: Combine) -> Tensor:
        """What the guidance makes of them and of latents that were moved where ComfyUI moves them."""
        return combine(moved=self._moved)

    def _to_skip(self, groups: Sequence[Sequence[int]], latent: Tensor) -> set[int]:
        """The prompts that are not computed in this call, the same on every rank."""
        if self._first is None:
            self._first = groups[0][0]
        to_skip: set[int] = set()
        for group in groups:
            known = self._known.issuperset(group)
            if (to_skip and known) or (self._first in group and self._change.is_small(latent, known)):
                to_skip |= set(group)
        return to_skip


class LazyCache:
    """Keeps what a whole call, guidance and all, added to the sampler's latent."""

    def __init__(self, settings: CacheSettings, mesh: Mesh, broadcast_flag: BroadcastFlag) -> None:
        self.skipped = 0
        self._settings = settings
        self._change = _Change(settings, (mesh.data,), (mesh.data,), broadcast_flag)
        self._skips = False
        self._added: Tensor | None = None

    def outputs(
        self, sigma: Tensor, x: Tensor, latent: Tensor | None, batches: Sequence[Batch], run: Run
    ) -> list[Tensor | None]:
        """None at all where the call is skipped, which it is on all ranks alike."""
        self._change.begin()
        inside = bool(sigma <= self._settings.start) and bool(sigma > self._settings.end)
        self._skips = inside and self._change.is_small(x, known=True)
        self.skipped += self._skips
        return [] if self._skips else run(batches)

    def denoised(self, sigma: Tensor, x: Tensor, combine: Combine) -> Tensor:
        """The latent and what was added to it last, where the call is skipped."""
        if self._skips:
            assert self._added is not None
            return x + self._added
        out = combine()
        if sigma > self._settings.end:
            self._added = out - x
            self._change.learn(x, [out], [out])
        return out


class _Change:
    """How much the output has probably changed since it was last computed, in parts of itself.

    Args:
        of_input, of_output: the axes whose ranks have other parts of the model's input and of its output.
    """

    def __init__(
        self,
        settings: CacheSettings,
        of_input: Sequence[Communicator],
        of_output: Sequence[Communicator],
        broadcast_flag: BroadcastFlag,
    ) -> None:
        self._settings = settings
        self._of_input = of_input
        self._of_output = of_output
        self._broadcast_flag = broadcast_flag
        self._moved: Tensor | None = None
        self._rate: Tensor | None = None
        self._size: Tensor | None = None
        self._gathered: float | Tensor = 0.0
        self._input: Tensor | None = None
        self._output: Collection[Tensor] = ()

    def begin(self) -> None:
        """Another call: how far its input has moved is not known."""
        self._moved = None

    def is_small(self, x: Tensor, known: bool) -> bool:
        """Whether a call with this input need not be computed; `known` says that it could be answered."""
        if self._input is None:
            return False
        self._moved = _mean([self._sampled(x) - self._input], self._of_input, x.dtype)
        if self._size is None or self._rate is None:
            return False
        self._gathered = self._gathered + (self._rate * self._moved) / self._size
        if self._broadcast_flag(bool(self._gathered < self._settings.threshold) and known):
            return True
        self._gathered = 0.0
        return False

    def learn(self, x: Tensor, output: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """What a computed call gave.

        Args:
            output: this rank's part of the output that is looked at; none where others have it.
            outputs: this rank's part of all that was computed with it; changes are measured by them.
        """
        dtype = outputs[0].dtype if outputs else x.dtype
        sampled = [self._sampled(part) for part in output]
        if self._size is not None:
            changes = [part - before for part, before in zip(sampled, self._output, strict=True)]
            changed = _mean(changes, self._of_output, dtype)
            if self._moved is not None:
                self._rate = changed / self._moved
        self._input = self._sampled(x).clone()
        self._output = [part.clone() for part in sampled]
        self._size = _mean(outputs, self._of_output, dtype)

    def _sampled(self, x: Tensor) -> Tensor:
        return x[..., :: self._settings.stride, :: self._settings.stride]


def _mean(parts: Sequence[Tensor], axes: Sequence[Communicator], dtype: torch.dtype) -> Tensor:
    """The mean of the absolute values of these tensors on all ranks of the axes, 0-dim. A collective."""
    device = axes[0].device
    sums = [part.abs().sum(dtype=torch.float64) for part in parts]
    total = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    count = torch.full_like(total, sum(part.numel() for part in parts))
    both = torch.stack([total, count]).view(1, 1, 2)
    for axis in axes:
        both = axis.all_gather(both, [1] * axis.size).sum(dim=1, keepdim=True)
    return (both[0, 0, 0] / both[0, 0, 1]).to(dtype)


def step_cache(
    settings: CacheSettings | None, prompts: Prompts, mesh: Mesh, broadcast_flag: BroadcastFlag
) -> StepCache:
    """What a request asks for."""
    if settings is None:
        return EveryCall()
    if settings.kind == "EasyCache":
        return EasyCache(settings, prompts, mesh, broadcast_flag)
    return LazyCache(settings, mesh, broadcast_flag)
