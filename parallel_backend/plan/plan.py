"""The types of plans: the user's requested plan, the plan that can run, and the limits of a model and a job."""

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
"""The forms in which attention's operands and results travel between ranks. All but the first change the picture slightly."""

COMPILE = ("off", "on")
"""Values of the plan's `compile` setting. With "on" the workers compile the model's blocks."""

COMPILER = "inductor"
"""The backend of torch.compile for `compile` "on"."""


class ParallelPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The requested plan: the user's settings for parallelising one denoise. A degree of 0 means "choose for me".

    Attributes:
        devices: "auto" (the visible GPUs that are worth using together), "all", or a list of GPU indices ("0,1" or "0-3").
            "0,0" is two workers on one GPU, "cpu:N" N workers on the CPU, "tcp://HOST:PORT" workers on other machines.
        cfg: ranks for the positive and the negative branch.
        pipefusion: pipeline stages. 0 also chooses among plans that change the picture.
        ulysses: ranks of DeepSpeed-Ulysses.
        ring: ranks of Ring Attention.
        data: ranks for different rows of the batch.
        patches: PipeFusion patches. 0: as many as pipeline stages.
        warmup_steps: steps that compute all tokens before patches stream.
        stages: the number of blocks of each pipeline stage ("20,37"), or "" to cut them by measured time.
        weights: the way to hold weights, one of WEIGHTS.
        attention: the choice of attention kernel.
        memory_limit: gigabytes (10^9 bytes) for each device. 0: all that is free.
        exchange: the form of tensors that attention sends, one of EXCHANGES.
        compile: "on" to compile the model's blocks in the workers.
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
        """Return the backend of torch.compile for the blocks; empty if they are not compiled."""
        return "" if self.compile == COMPILE[0] else COMPILER


class MeshCoordinates(NamedTuple):
    """The coordinates of a rank: its number along each axis, in the order of PLAN_AXES."""

    data: int
    cfg: int
    pipefusion: int
    ring: int
    ulysses: int


class ResolvedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that can run: every degree is at least 1, and their product is the number of devices.

    Attributes not listed here mean the same as in `ParallelPlan`.

    Attributes:
        devices: one device for each rank.
        stages: the number of blocks of each pipeline stage. Empty for work that is cut in space, such as a VAE's.
        memory_limit: gigabytes for each device. 0: no limit.
        shares: tokens are cut over the ring x ulysses sequence ranks in proportion to these numbers.
        batch_shares: the batch is cut over the data ranks in proportion to these numbers. Empty: evenly.
        head_chunks: the largest number of chunks in which Ulysses exchanges heads. The exchange of a chunk overlaps with the
            attention of another.
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
        """Return the rows of a batch that each data rank computes; at least one row each if there are enough."""
        return _cut(batch, self.batch_shares or (1,) * self.data)

    def groups(self, items: int) -> list[slice]:
        """Return the items, such as the rows of a model call, that the ranks of each data and cfg coordinate compute."""
        shares = self.batch_shares or (1,) * self.data
        return _cut(items, [share for share in shares for _ in range(self.cfg)])

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return len(self.devices)

    @property
    def on_gpus(self) -> bool:
        """Return True if each device is a GPU. Predictions of time are shown for such plans alone."""
        return all(map(_is_gpu, self.devices))

    @property
    def transport(self) -> str:
        """Return "nccl" if each rank has a GPU of its own; "gloo" on CPUs and for ranks that share a GPU (via host memory)."""
        return "nccl" if self.on_gpus and not share_a_gpu(self.devices) else "gloo"

    @property
    def uses_pipefusion(self) -> bool:
        """Return True if the picture is computed in patches or the blocks in stages, so no rank runs a whole model call."""
        return max(self.pipefusion, self.patches) > 1

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Return the size of each axis, in the order of PLAN_AXES."""
        return tuple(getattr(self, axis) for axis in PLAN_AXES)

    def coordinates(self, rank: int) -> MeshCoordinates:
        """Return the mesh coordinates of a world rank. Neighbours along the last axis have neighbouring numbers."""
        along = []
        for degree in reversed(self.mesh_shape):
            rank, at = divmod(rank, degree)
            along.append(at)
        return MeshCoordinates(*reversed(along))

    def rank_at(self, coordinates: MeshCoordinates) -> int:
        """Return the world rank at these mesh coordinates."""
        rank = 0
        for degree, at in zip(self.mesh_shape, coordinates, strict=True):
            rank = rank * degree + at
        return rank

    def stage_ranks(self, stage: int) -> list[int]:
        """Return the world ranks of a pipeline stage."""
        return [rank for rank in range(self.world_size) if self.coordinates(rank).pipefusion == stage]

    def without_pipefusion(self) -> ResolvedPlan:
        """Return this plan with its pipeline stages turned into Ring attention ranks.

        Replicated weights become sharded unless workers share a GPU.
        """
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
        """Return True if attention's ranks exchange rounded tensors, which changes the picture slightly."""
        return self.exchange != EXCHANGES[0] and self.ring * self.ulysses > 1

    @property
    def degrees(self) -> str:
        """Return the degrees above 1 as text, such as `cfg 2 x ulysses 4`; `1 worker` if there are none."""
        named = [f"{axis} {degree}" for axis, degree in zip(PLAN_AXES, self.mesh_shape, strict=True) if degree > 1]
        return " x ".join(named) or "1 worker"

    def describe(self, approximate_attention: bool = False) -> str:
        """Return a short text for logs, such as `4 workers (cuda:0 … cuda:3): ring 2 x ulysses 2`.

        Args:
            approximate_attention: the plan's attention kernel is approximate, which `attention.kernels.describe` finds out.
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
    """Return True if two workers are on one GPU."""
    gpus = [device for device in devices if _is_gpu(device)]
    return len(set(gpus)) < len(gpus)


def _is_gpu(device: str) -> bool:
    return device.rpartition("/")[2].startswith("cuda")


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model's shape to plans.

    Attributes:
        heads: the number of attention heads.
        head_dim: the width of a head.
        blocks: the number of blocks.
        whole_picture: PipeFusion is impossible.
        unsharded: plans can split only prompts and the batch.
    """

    heads: int
    head_dim: int
    blocks: int
    whole_picture: bool = False
    unsharded: bool = False


@dataclass(frozen=True)
class Workload:
    """The limits of a job to plans: its batch, True if it has a negative prompt, and its rows of image tokens."""

    batch: int
    has_uncond: bool
    token_rows: int


AUTOMATIC, SMALLEST, SLOW_LINKS = "automatic", "smallest memory", "slow links (approximate)"
PRESETS = (AUTOMATIC, SMALLEST, SLOW_LINKS)


def with_preset(preset: str, fields: ParallelPlan) -> ParallelPlan:
    """Return the requested plan for a preset and the node's other fields.

    A `pipefusion` above 1, and `weights` other than replicated, override the preset's choice. A `warmup_steps` of 0 becomes
    the default number.

    `automatic` allows exact plans only. `smallest memory` also streams the weights from host memory. `slow links` also
    allows PipeFusion, which changes the picture. With every preset, an exact plan on GPUs streams weights that do not fit.
    """
    staged = fields.pipefusion > 1
    off = 0 if preset == SLOW_LINKS else 1
    return msgspec.structs.replace(
        fields,
        pipefusion=fields.pipefusion if staged else off,
        warmup_steps=fields.warmup_steps or ParallelPlan().warmup_steps,
        weights="streamed" if preset == SMALLEST and fields.weights == "replicated" else fields.weights,
    )
