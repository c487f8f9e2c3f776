"""Step caches: skipped model calls reuse the effect of the last computed call (approximate).

The rule is that of ComfyUI's EasyCache and LazyCache nodes, with the same order of operations and rounding, so that the same
calls are skipped. The rule compares means over the whole batch: each group of ranks sums its part, and groups exchange the
sums. Rank 0's decision counts, so that all ranks take the same branch on any mixture of devices.
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
"""A function that returns rank 0's flag on every rank. A collective."""

Run = Callable[[Sequence[Batch]], list[Tensor | None]]
"""A function that computes the model's outputs for all batches of a call that are not skipped.

It is called for an empty list too, because other ranks may have batches to compute.
"""


Combine = Callable[..., Tensor]
"""A function that applies the guidance to a call's outputs. Its only argument is `moved` (see `Guidance.averages`)."""


class StepCache(Protocol):
    """A cache around the model calls of a denoise.

    Attributes:
        skipped: the number of calls that were not computed.
    """

    skipped: int

    def outputs(
        self, sigma: Tensor, x: Tensor, latent: Tensor | None, batches: Sequence[Batch], run: Run
    ) -> list[Tensor | None]:
        """Return the outputs of a call's batches, computed or from the cache.

        Args:
            sigma: 0-dim fp32 on the CPU.
            x: the sampler's latent, fp32.
            latent: the model's input in the compute dtype; None on a stage that does not read the latent.
            batches: this rank's batches of the call.
            run: computes the outputs of batches.
        """

    def denoised(self, sigma: Tensor, x: Tensor, combine: Combine) -> Tensor:
        """Return the call's denoised latent, from `combine` or from the cache."""


class EveryCall:
    """The absence of a cache: every call is computed."""

    skipped = 0

    def outputs(
        self, sigma: Tensor, x: Tensor, latent: Tensor | None, batches: Sequence[Batch], run: Run
    ) -> list[Tensor | None]:
        """Compute the outputs of all batches."""
        return run(batches)

    def denoised(self, sigma: Tensor, x: Tensor, combine: Combine) -> Tensor:
        """Return the guidance's result."""
        return combine()


class EasyCache:
    """ComfyUI's EasyCache: keeps for each prompt the difference between the model's output and its input.

    All prompts of a call follow the first prompt's decision.
    """

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
        """Return the outputs of a call; for skipped prompts the model's input plus the kept difference."""
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
                    # ComfyUI's node adds in place. If the input is x itself (not cast, scaled or concatenated), ComfyUI then
                    # computes the denoised latent from the changed x.
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
        """Return the guidance's result, with the latents that ComfyUI would have changed in place."""
        return combine(moved=self._moved)

    def _to_skip(self, groups: Sequence[Sequence[int]], latent: Tensor) -> set[int]:
        """Return the numbers of the prompts that this call does not compute, the same on every rank."""
        if self._first is None:
            self._first = groups[0][0]
        to_skip: set[int] = set()
        for group in groups:
            known = self._known.issuperset(group)
            if (to_skip and known) or (self._first in group and self._change.is_small(latent, known)):
                to_skip |= set(group)
        return to_skip


class LazyCache:
    """ComfyUI's LazyCache: keeps the difference between a call's denoised latent, after guidance, and the sampler's latent."""

    def __init__(self, settings: CacheSettings, mesh: Mesh, broadcast_flag: BroadcastFlag) -> None:
        self.skipped = 0
        self._settings = settings
        self._change = _Change(settings, (mesh.data,), (mesh.data,), broadcast_flag)
        self._skips = False
        self._added: Tensor | None = None

    def outputs(
        self, sigma: Tensor, x: Tensor, latent: Tensor | None, batches: Sequence[Batch], run: Run
    ) -> list[Tensor | None]:
        """Return the outputs of all batches; an empty list if the call is skipped, which all ranks do together."""
        self._change.begin()
        inside = bool(sigma <= self._settings.start) and bool(sigma > self._settings.end)
        self._skips = inside and self._change.is_small(x, known=True)
        self.skipped += self._skips
        return [] if self._skips else run(batches)

    def denoised(self, sigma: Tensor, x: Tensor, combine: Combine) -> Tensor:
        """Return the guidance's result; for a skipped call the latent plus the kept difference."""
        if self._skips:
            assert self._added is not None
            return x + self._added
        out = combine()
        if sigma > self._settings.end:
            self._added = out - x
            self._change.learn(x, [out], [out])
        return out


class _Change:
    """The estimated change of the output since it was last computed, relative to the output.

    Args:
        settings: the cache's settings.
        of_input: the axes whose ranks have different parts of the model's input.
        of_output: the axes whose ranks have different parts of the model's output.
        broadcast_flag: returns rank 0's flag on every rank.
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
        """Start another call, whose change of input is not known yet."""
        self._moved = None

    def is_small(self, x: Tensor, known: bool) -> bool:
        """Return True if the call need not be computed. A collective.

        Args:
            x: the call's input.
            known: True if the cache could answer the call.
        """
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
        """Note the input and the outputs of a computed call. A collective.

        Args:
            x: the call's input.
            output: this rank's part of the output whose change is measured; empty if other ranks have it.
            outputs: this rank's part of all outputs of the same forward. The change is relative to their size.
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
    """Return the mean of the absolute values of these tensors on all ranks of the axes, 0-dim. A collective."""
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
    """Return the step cache of a request's settings."""
    if settings is None:
        return EveryCall()
    if settings.kind == "EasyCache":
        return EasyCache(settings, prompts, mesh, broadcast_flag)
    return LazyCache(settings, mesh, broadcast_flag)
