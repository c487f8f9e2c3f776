"""The memory that each rank of a plan needs of its device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from ...layout import SequenceSplit, length
from ..plan import ResolvedPlan
from .profiles import DenoiseJob, ModelShape, Profile

EXCHANGED = 6
"""Features per token, in units of the hidden size, that Ulysses holds besides the block: sent and received q, k and v."""

PACKED = 2
"""Further features per token, in the same units, that packing q, k and v in fp8 holds."""

CIRCULATED = 17
"""Features per token that Ring holds: k and v stacked (2), sent and received (4), merged fp32 outputs (6), outputs, and q."""

LATENTS = 2
"""Latents that every rank has whole and in fp32, whatever its share: the initial and the present latent."""

Lacking = Callable[[int, int, int], float]
"""A function of (stage, first block, number of blocks) that returns the bytes that the stage's fullest rank lacks for them."""


@dataclass(frozen=True)
class Needs:
    """The bytes that a rank needs: its weights, gathered weights of other ranks, and activations."""

    weights: float
    gathered: float
    activations: float

    @property
    def working(self) -> float:
        """Return the bytes besides the rank's own weights, which come and go during a run."""
        return self.gathered + self.activations


def needs(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob) -> Needs:
    """Return the largest need of any rank for a job, part by part, without the device's context."""
    every = needs_by_rank(plan, model, job)
    return Needs(*(max(getattr(entry, part) for entry in every) for part in ("weights", "gathered", "activations")))


def needs_by_rank(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob) -> list[Needs]:
    """Return each rank's needs: the weights of its stage's blocks, and activations of its own tokens."""
    starts = [sum(plan.stages[:stage]) for stage in range(plan.pipefusion)]
    weights = [_weight_bytes(plan, model, job, first, count) for first, count in zip(starts, plan.stages, strict=True)]
    working = _working(plan, model, job)
    result = []
    for rank in range(plan.world_size):
        stage, (activations, cache) = plan.coordinates(rank).pipefusion, working[rank % len(working)]
        result.append(Needs(*weights[stage], activations + cache * plan.stages[stage]))
    return result


def needed_by_rank(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile) -> tuple[float, ...]:
    """Return the bytes that each rank needs of its device in total."""
    extra = _overhead_bytes(plan, profile)
    return tuple(entry.weights + entry.working + extra for entry in needs_by_rank(plan, model, job))


def lacking(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile) -> Lacking:
    """Return a function that returns the bytes that a stage of the plan lacks for any run of blocks."""
    working, extra = _working(plan, model, job), _overhead_bytes(plan, profile)

    def free_bytes(rank: int) -> tuple[float, float]:
        """Return a rank's free bytes for blocks and their caches, and the bytes of one block's cache."""
        activations, cache = working[rank % len(working)]
        return profile.memory(rank) - extra - activations, cache

    spare = [set(map(free_bytes, plan.stage_ranks(stage))) for stage in range(plan.pipefusion)]

    def lacks(stage: int, first: int, count: int) -> float:
        weights = sum(_weight_bytes(plan, model, job, first, count))
        return max(0.0, *(weights + cache * count - free for free, cache in spare[stage]))

    return lacks


def _weight_bytes(
    plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, first: int, count: int
) -> tuple[float, float]:
    """Return the bytes of weights of a rank whose stage has these blocks, and the bytes of weights that the rank gathers."""
    block_weights = model.weights(first, count)
    weights, gathered = float(block_weights + model.other_weights), 0.0
    two = float(min(2 * max(model.double_weights, model.single_weights), block_weights))
    if plan.weights == "sharded":
        gathered = two  # the block in use and the one being gathered
        weights = block_weights / plan.world_size + model.other_weights
    elif plan.weights == "streamed":
        weights = two + model.other_weights  # blocks that do not fit stay in host memory
    return weights * job.weight_element, gathered * job.weight_element


def _working(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob) -> list[tuple[float, float]]:
    """Return each sequence rank's bytes of activations, with an expanded matrix, and of one block's cached keys and values.

    Without patches nothing is cached.
    """
    if model.unsharded:
        return [(LATENTS * job.batch * job.image_tokens * model.channels * 4 + whole_bytes(plan, job), 0.0)]
    text = job.text_tokens if model.joint_text else 0
    tokens = items(plan, job) * (job.image_tokens + text)
    row = model.hidden * job.element
    copies = model.copies + EXCHANGED * (plan.ulysses > 1) + CIRCULATED * (plan.ring > 1)
    copies += PACKED * plan.exchanges_approximately
    split = SequenceSplit.of((tokens,), model.heads, plan.ring, plan.ulysses, plan.shares, model.kv_heads)
    cached = itertools.product(split.ring_tokens(), split.kv_counts())  # the split of all tokens' keys and values
    latents = LATENTS * job.batch * job.image_tokens * model.channels * 4
    result = []
    for share, (keys, heads) in zip(plan.shares, cached, strict=True):
        activations = copies * math.ceil(tokens * share / sum(plan.shares)) * row
        if model.embeds_whole:  # these tokens are made in fp32, before all else, and stay until the first block returns
            activations = max(tokens * (row + 4 * model.hidden), tokens * row + activations)
        cache = 2 * keys * heads * model.head_dim * job.element * model.attentions if plan.patches > 1 else 0.0
        result.append((latents + activations + job.expanded, cache))
    return result


def connections(plan: ResolvedPlan) -> int:
    """Return the number of peers for which a rank's communicators (`mesh.build_mesh`) keep buffers on the GPU."""
    if plan.transport != "nccl":
        return 0
    sizes = [*plan.mesh_shape, plan.pipefusion]  # and `latent_return`
    if plan.ring > 1 and plan.ulysses > 1:
        sizes.append(plan.ring * plan.ulysses)  # `sequence`, which is otherwise one of the two
    return sum(size - 1 for size in sizes)


def rows_connections(plan: ResolvedPlan) -> int:
    """Return the number of connections that VAE decoding and sharded weights add, since a decode follows on the same GPU."""
    return plan.world_size - 1 if plan.transport == "nccl" else 0


def _overhead_bytes(plan: ResolvedPlan, profile: Profile) -> float:
    """Return the bytes that a worker needs besides the model and its computation."""
    device = profile.device
    return device.context + (connections(plan) + rows_connections(plan)) * device.connection


def items(plan: ResolvedPlan, job: DenoiseJob) -> int:
    """Return the largest number of batch items that a rank computes at once. An item counts once per branch."""
    return max(map(length, plan.parts(job.batch))) * branches_together(plan, job)


def branches_together(plan: ResolvedPlan, job: DenoiseJob) -> int:
    """Return the number of branches that a rank computes together."""
    return 2 if job.has_uncond and plan.cfg == 1 else 1


def whole_bytes(plan: ResolvedPlan, job: DenoiseJob) -> float:
    """Return the bytes that a forward of an unsharded model needs on one rank, besides weights."""
    return items(plan, job) * job.item_bytes + job.expanded
