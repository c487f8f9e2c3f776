"""The types of a plan: the user's wish, what can run, and what a model and a job allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ..layout import cut_by, length
from ..mesh_axes import PLAN_AXES

MAX_WORLD_SIZE = 64

WEIGHTS = ("replicated", "sharded", "streamed")

EXCHANGES = ("exact", "fp8")
"""How attention's operands and results travel between ranks; all but the first change the picture slightly."""

COMPILE = ("off", "on")
"""Whether the workers compile a model's blocks; only the second does."""

COMPILER = "inductor"
"""The backend of torch.compile that `compile` on stands for."""


class ParallelPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wish for how to spread one denoise; a degree of 0 means "choose for me".

    `devices` is "auto" (the visible GPUs that are worth using together), "all", a list of GPU indices ("0,1"; "0-3"; "0,0"
    puts two workers on one GPU), "cpu:N" for N workers on the CPU, or "tcp://HOST:PORT" for workers on other machines.
    `pipefusion` 0 also chooses among plans that change the picture. `patches` 0 means as many as pipeline stages.
    `stages` gives the number of blocks of each PipeFusion stage ("20,37"), or "" to cut them by measured time.
    `memory_limit` is in gigabytes (10^9 bytes) a device; 0 means all that is free. `compile` "on" has the workers compile the
    model's blocks.
    """

    devices: str = "auto"
    cfg: int = 0
    pipefusion: int = 1
    ulysses: int = 0
    ring: int = 0
    data: int = 0
    patches: int = 0
    warmup_steps: int = 1
    stages: str = ""
    weights: str = "replicated"
    attention: str = "auto"
    memory_limit: float = 0.0
    exchange: str = EXCHANGES[0]
    compile: str = COMPILE[0]

    @property
    def compiler(self) -> str:
        """The backend of torch.compile for the blocks; empty for none."""
        return "" if self.compile == COMPILE[0] else COMPILER


class Place(NamedTuple):
    """The coordinates of a rank: its number along each axis, in the order of PLAN_AXES."""

    data: int
    cfg: int
    pipefusion: int
    ring: int
    ulysses: int


class ResolvedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that can run: one device a rank, every degree at least 1, their product the world size.

    `stages` holds the number of blocks of each PipeFusion stage, and nothing where work is cut in space; `memory_limit` is
    in gigabytes a device, 0 for none. Tokens are cut over the ring x ulysses sequence ranks in proportion to `shares`, the
    batch over the data ranks in proportion to `batch_shares`, evenly where that is empty. Ulysses exchanges the heads in
    `head_chunks`, or as many as they allow, each behind the attention of another.
    """

    devices: tuple[str, ...]
    data: int
    cfg: int
    pipefusion: int
    ring: int
    ulysses: int
    patches: int
    warmup_steps: int
    stages: tuple[int, ...]
    weights: str
    attention: str
    memory_limit: float
    shares: tuple[int, ...]
    batch_shares: tuple[int, ...] = ()
    head_chunks: int = 1
    exchange: str = EXCHANGES[0]

    def parts(self, batch: int) -> list[slice]:
        """The rows of a batch that each data rank computes; none is left without one where there are enough."""
        return _cut(batch, self.batch_shares or (1,) * self.data)

    def groups(self, items: int) -> list[slice]:
        """Which of some things, such as a model call's rows, the ranks at each place of the data and cfg axes compute."""
        shares = self.batch_shares or (1,) * self.data
        return _cut(items, [share for share in shares for _ in range(self.cfg)])

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return len(self.devices)

    @property
    def transport(self) -> str:
        """ "nccl" with one GPU a rank; "gloo" on CPUs and when ranks share a GPU (staged through host memory)."""
        return "nccl" if all(map(_is_gpu, self.devices)) and not share_a_gpu(self.devices) else "gloo"

    @property
    def uses_pipefusion(self) -> bool:
        """True if the picture is computed in patches, or the blocks in stages, so that a rank's call is not the whole model's."""
        return max(self.pipefusion, self.patches) > 1

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The size of each axis, in the order of PLAN_AXES."""
        return tuple(getattr(self, axis) for axis in PLAN_AXES)

    def place(self, rank: int) -> Place:
        """Return the mesh coordinates of a world rank. Neighbours along the last axis have neighbouring numbers."""
        along = []
        for degree in reversed(self.mesh_shape):
            rank, at = divmod(rank, degree)
            along.append(at)
        return Place(*reversed(along))

    def rank_at(self, coordinates: Place) -> int:
        """Return the world rank at a rank's coordinates in the mesh."""
        rank = 0
        for degree, at in zip(self.mesh_shape, coordinates, strict=True):
            rank = rank * degree + at
        return rank

    def stage_ranks(self, stage: int) -> list[int]:
        """The world ranks of a stage."""
        return [rank for rank in range(self.world_size) if self.place(rank).pipefusion == stage]

    def without_pipefusion(self) -> ResolvedPlan:
        """Return this plan with its pipeline stages turned into Ring attention ranks; weights are sharded where they can be."""
        shard = self.weights == "replicated" and not share_a_gpu(self.devices)
        return msgspec.structs.replace(
            self,
            pipefusion=1,
            ring=self.ring * self.pipefusion,
            patches=1,
            stages=(sum(self.stages),),
            shares=(1,) * (self.ring * self.pipefusion * self.ulysses),
            weights="sharded" if shard else self.weights,
        )

    @property
    def exchanges_approximately(self) -> bool:
        """Whether what attention's ranks exchange is rounded, which changes the picture slightly."""
        return self.exchange != EXCHANGES[0] and self.ring * self.ulysses > 1

    @property
    def degrees(self) -> str:
        """The degrees above 1, such as `cfg 2 x ulysses 4`; `1 worker` if there is none."""
        named = [f"{axis} {degree}" for axis, degree in zip(PLAN_AXES, self.mesh_shape, strict=True) if degree > 1]
        return " x ".join(named) or "1 worker"

    def describe(self, approximate_attention: bool = False) -> str:
        """Short text for logs, such as `4 workers (cuda:0 … cuda:3): ring 2 x ulysses 2`.

        Args:
            approximate_attention: whether to say so of the attention asked for; `attention.kernels.describe` knows.
        """
        first, last = self.devices[0], self.devices[-1]
        where = first if first == last else f"{first} … {last}"
        several = f"{self.world_size} workers ({where}): {self.degrees}"
        text = several if self.world_size > 1 else f"1 worker ({where})"
        if self.patches > 1:
            text += f", {self.patches} patches after {self.warmup_steps} warm-up step(s)"
        if len(set(self.shares)) > 1:
            text += f", tokens {' : '.join(map(str, self.shares))} by speed and memory"
        if len(set(self.batch_shares)) > 1:
            text += f", the batch {' : '.join(map(str, self.batch_shares))} by speed"
        if self.head_chunks > 1:
            text += f", heads exchanged in {self.head_chunks} chunks"
        if self.exchanges_approximately:
            text += f", exchange {self.exchange} (approximate)"
        if approximate_attention:
            text += f", attention {self.attention} (approximate)"
        return text + ("" if self.weights == "replicated" else f", weights {self.weights}")


def _cut(items: int, shares: Sequence[int]) -> list[slice]:
    runs = cut_by(items, shares)
    if items < len(shares) or all(map(length, runs)):
        return runs
    more = cut_by(items - len(shares), shares)
    return [slice(run.start + at, run.stop + at + 1) for at, run in enumerate(more)]


def share_a_gpu(devices: Sequence[str]) -> bool:
    """Whether two workers are on one GPU."""
    gpus = [device for device in devices if _is_gpu(device)]
    return len(set(gpus)) < len(gpus)


def _is_gpu(device: str) -> bool:
    return device.rpartition("/")[2].startswith("cuda")


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model's shape to plans: with `whole_picture` no PipeFusion, with `unsharded` only prompts and batches."""

    heads: int
    head_dim: int
    blocks: int
    whole_picture: bool = False
    unsharded: bool = False


@dataclass(frozen=True)
class Workload:
    """What a job allows a plan to be: its batch, whether a negative prompt takes part, and its rows of image tokens."""

    batch: int
    has_uncond: bool
    token_rows: int


AUTOMATIC, SMALLEST, SLOW_LINKS = "automatic", "smallest memory", "slow links (approximate)"
PRESETS = (AUTOMATIC, SMALLEST, SLOW_LINKS)


def with_preset(preset: str, fields: ParallelPlan) -> ParallelPlan:
    """The plan for a preset and the fields beside it, where 0 means "choose for me" and any other value counts.

    `automatic` chooses exact plans only, `smallest memory` besides streams the weights from host memory, `slow links` also
    chooses PipeFusion, which changes the picture.
    """
    staged = fields.pipefusion > 1
    off = 0 if preset == SLOW_LINKS else 1
    return msgspec.structs.replace(
        fields,
        pipefusion=fields.pipefusion if staged else off,
        warmup_steps=fields.warmup_steps or ParallelPlan().warmup_steps,
        weights="streamed" if preset == SMALLEST and fields.weights == "replicated" else fields.weights,
    )
