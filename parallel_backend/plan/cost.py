"""The cost of a plan on a machine: seconds a step, bytes sent, and the memory a rank needs.

Phases between collectives wait for the slowest rank, so each phase costs what the rank with the most tokens or heads
needs. The host starts operations ahead of the device: a pass over the blocks takes as long as the slower of the two.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..layout import SequenceSplit, cut, length
from .plan import Place, ResolvedPlan
from .profiles import Level, ModelShape, Profile

EXCHANGED = 6
"""Features that Ulysses holds for a token beside the block's own: q, k and v as they are sent and as they come."""

CIRCULATED = 17
"""The same for Ring: k and v stacked (2) and as they leave and come (4), merged outputs in fp32 (6), outputs, and q."""

Flow = tuple[int, int, float]
"""From rank, to rank, bytes."""


@dataclass(frozen=True)
class Job:
    """What is denoised: tokens of one batch item, whether a negative branch takes part.

    `element` is bytes of an element of activations, `weight_element` of weights (fp8 and GGUF have less).
    """

    image_tokens: int
    text_tokens: int
    batch: int = 1
    two_sided: bool = False
    steps: int = 28
    element: int = 2
    weight_element: float = 2


@dataclass(frozen=True)
class Cost:
    """Seconds a step on average over the job, and what they are made of (also seconds a step); bytes of one rank.

    `device` is matmul, attention and memory traffic; `ulysses`, `ring`, `pipeline`, `cfg` and `gather` are the parts of
    communication that do not hide behind it; `launch` is what the host is slower than all of that; `fill` is the
    warm-up and the filling of the pipeline. `memory` is what the fullest rank needs, `weights` its share of weights.
    """

    device: float
    ulysses: float
    ring: float
    pipeline: float
    cfg: float
    gather: float
    launch: float
    fill: float
    memory: float
    weights: float

    @property
    def seconds(self) -> float:
        """Seconds a step."""
        return self.device + self.communication + self.launch + self.fill

    @property
    def communication(self) -> float:
        """Seconds a step spent waiting for other ranks."""
        return self.ulysses + self.ring + self.pipeline + self.cfg + self.gather


def ulysses_bytes(
    tokens: float, hidden: int, blocks: int, element: int, ring: int, ulysses: int, group: float = 1
) -> float:
    """Bytes a rank sends in one forward for Ulysses; `tokens` is batch x (text + image). Even cuts, of whole groups.

    Args:
        group: how many of the queries' heads share one of keys and values.
    """
    return (2 + 2 / group) * (ulysses - 1) / ulysses * tokens * hidden / (ring * ulysses) * blocks * element


def ring_bytes(
    tokens: float, hidden: int, blocks: int, element: int, ring: int, ulysses: int, group: float = 1
) -> float:
    """Bytes a rank sends in one forward for Ring; arguments as of `ulysses_bytes`."""
    return 2 / group * (ring - 1) * tokens * hidden / (ring * ulysses) * blocks * element


def transfer_seconds(flows: Iterable[Flow], levels: tuple[Level, ...], messages: int = 1) -> float:
    """Seconds until all flows, sent at once in so many messages, have passed every port; 0 if nothing is sent."""
    load: dict[tuple[int, int, bool], float] = {}
    top = -1
    for source, target, size in flows:
        if source == target or size == 0:
            continue
        below = 1
        for depth, level in enumerate(levels):
            for rank, outward in ((source, True), (target, False)):
                port = (depth, rank // below, outward)
                load[port] = load.get(port, 0.0) + size
            top = max(top, depth)
            below = level.size
            if source // below == target // below:
                break
    if top < 0:
        return 0.0
    return messages * levels[top].latency + max(size / levels[depth].bandwidth for (depth, _, _), size in load.items())


@dataclass(frozen=True)
class Needs:
    """Bytes that the fullest rank needs: its weights, shards of others while they are gathered, and activations."""

    weights: float
    gathered: float
    activations: float

    @property
    def working(self) -> float:
        """What comes and goes beside the weights."""
        return self.gathered + self.activations


def needs(plan: ResolvedPlan, model: ModelShape, job: Job) -> Needs:
    """What a rank needs of its device for a job, besides the context of the device itself."""
    starts = [sum(plan.stages[:stage]) for stage in range(plan.pipefusion)]
    held = max(model.weights(first, count) for first, count in zip(starts, plan.stages, strict=True))
    weights, gathered = float(held + model.other_weights), 0.0
    two = float(min(2 * max(model.double_weights, model.single_weights), held))
    if plan.weights == "sharded":
        gathered = two  # the block in use and the one being gathered
        weights = held / plan.world_size + model.other_weights
    elif plan.weights == "streamed":
        weights = two + model.other_weights  # the rest is in host memory, as far as it has no room here
    text = job.text_tokens if model.joint_text else 0
    tokens = items(plan, job) * (job.image_tokens + text)
    row = model.hidden * job.element
    copies = model.copies + EXCHANGED * (plan.ulysses > 1) + CIRCULATED * (plan.ring > 1)
    activations = copies * math.ceil(tokens * max(plan.shares) / sum(plan.shares)) * row
    if model.embeds_whole:  # held until the first block returns; made in fp32, before there is anything else
        activations = max(tokens * (row + 4 * model.hidden), tokens * row + activations)
    cache = 0.0
    if plan.patches > 1:  # keys and values of all tokens, split by heads and by Ring's blocks of tokens
        split = SequenceSplit.of((tokens,), model.heads, plan.ring, plan.ulysses, plan.shares, model.kv_heads)
        features = max(split.kv_counts()) * model.head_dim
        cache = 2 * max(split.ring_tokens()) * features * job.element * model.attentions * max(plan.stages)
    return Needs(weights * job.weight_element, gathered * job.weight_element, activations + cache)


def connections(plan: ResolvedPlan) -> int:
    """Pairs of GPUs between which a rank's communicators (`mesh.build_mesh`) keep buffers on the device."""
    if plan.transport != "nccl":
        return 0
    sizes = (*plan.mesh_shape, plan.pipefusion, plan.ring * plan.ulysses)  # and `returning` and `sequence`
    return sum(size - 1 for size in sizes)


def rows_connections(plan: ResolvedPlan) -> int:
    """Those that decoding and sharded weights add; decoding finds the card as the denoise has left it."""
    return plan.world_size - 1 if plan.transport == "nccl" else 0


def items(plan: ResolvedPlan, job: Job) -> int:
    """Batch items, of both sides where they are computed together, that a rank computes at once."""
    return math.ceil(job.batch / plan.data) * (2 if job.two_sided and plan.cfg == 1 else 1)


def cost(plan: ResolvedPlan, model: ModelShape, job: Job, profile: Profile) -> Cost:
    """What a plan costs for a job on a machine."""
    return _Estimate(plan, model, job, profile).total()


@dataclass(frozen=True)
class _Pass:
    """Seconds of one pass of some image tokens through the blocks of one stage."""

    device: float
    ulysses: float
    ring: float
    gather: float
    launch: float

    @property
    def seconds(self) -> float:
        return self.device + self.ulysses + self.ring + self.gather + self.launch


class _Estimate:
    def __init__(self, plan: ResolvedPlan, model: ModelShape, job: Job, profile: Profile) -> None:
        self.plan, self.model, self.job, self.profile = plan, model, job, profile
        self.batch = items(plan, job)
        self.text = job.text_tokens if model.joint_text else 0
        self.stage_starts = [sum(plan.stages[:stage]) for stage in range(plan.pipefusion)]

    def total(self) -> Cost:
        plan, job = self.plan, self.job
        weights, memory = self._memory()
        whole = [self._pass(stage, job.image_tokens, self.text, False) for stage in range(plan.pipefusion)]
        cfg = self._cfg()
        if plan.patches == 1 and plan.pipefusion == 1:
            (one,) = whole
            return Cost(one.device, one.ulysses, one.ring, 0, cfg, one.gather, one.launch, 0, memory, weights)
        return self._piped(whole, cfg, memory, weights)

    def _piped(self, whole: list[_Pass], cfg: float, memory: float, weights: float) -> Cost:
        """Steps in patches: each stage works without pause unless a patch's round trip takes longer than the step."""
        plan, job = self.plan, self.job
        largest = max(length(run) for run in cut(job.image_tokens, plan.patches))
        first = [self._pass(stage, largest, self.text, True) for stage in range(plan.pipefusion)]
        others = [self._pass(stage, largest, 0, True) for stage in range(plan.pipefusion)]
        hop = self._stage_transfer(largest + self.text)
        busy = [one.seconds + (plan.patches - 1) * rest.seconds for one, rest in zip(first, others, strict=True)]
        round_trip = sum(one.seconds for one in first) + plan.pipefusion * hop
        slowest = max(range(plan.pipefusion), key=lambda stage: busy[stage])
        step = max(busy[slowest], round_trip)
        warm_up = sum(stage.seconds for stage in whole) + plan.pipefusion * self._stage_transfer(
            job.image_tokens + self.text
        )
        warm_steps = min(plan.warmup_steps, job.steps)
        steady = 1 - warm_steps / job.steps

        def part(name: str) -> float:
            patches = (plan.patches - 1) * getattr(others[slowest], name)
            return float(getattr(first[slowest], name) + patches) * steady

        fill = (warm_steps * warm_up + (round_trip - round_trip / plan.pipefusion) * bool(steady)) / job.steps
        return Cost(
            device=part("device"),
            ulysses=part("ulysses"),
            ring=part("ring"),
            pipeline=(step - busy[slowest]) * steady,
            cfg=cfg,
            gather=part("gather"),
            launch=part("launch"),
            fill=fill,
            memory=memory,
            weights=weights,
        )

    def _pass(self, stage: int, image: int, text: int, patched: bool) -> _Pass:
        """One pass through a stage; with `patched`, all other keys and values come from the stage's cache."""
        model, job, device, soft = self.model, self.job, self.profile.device, self.profile.software
        blocks = self.plan.stages[stage]
        sizes = self.plan.ring, self.plan.ulysses
        layout = SequenceSplit.of((text, image), model.heads, *sizes, self.plan.shares, model.kv_heads)
        paces = self._paces(stage)
        tokens = self.batch * max(map(operator.truediv, layout.tokens, paces))  # those of a rank of pace 1 in its place
        attended = itertools.product(layout.ring_tokens(), layout.head_counts())
        rows = self.batch * max(q * heads / pace for (q, heads), pace in zip(attended, paces, strict=True))
        keys = job.image_tokens + self.text
        matmul = 2 * tokens * model.token_weights / device.matmul
        scores = 4 * rows * keys * model.head_dim
        crossed = 0 if model.joint_text else 4 * tokens * job.text_tokens * model.hidden
        attention = scores / device.attention
        traffic = soft.passes * tokens * model.hidden * job.element
        merges = rows * model.head_dim * soft.merge_bytes * self.plan.ring if self.plan.ring > 1 else 0
        memory = (traffic + merges) / device.bandwidth
        ulysses = model.attentions * self._ulysses(layout)
        ring = model.attentions * self._ring(layout, attention, patched)
        own = matmul + model.attentions * attention + crossed / device.attention + memory
        gather = self._gather(own + ulysses + ring, stage)
        own_operations = soft.launch * model.operations(self.stage_starts[stage], blocks)
        added = soft.added_launch * model.attentions * blocks * self._added_operations(patched)
        host = device.launch * (own_operations + added)
        seen = blocks * (own + ulysses + ring) + gather
        return _Pass(blocks * own, blocks * ulysses, blocks * ring, gather, max(0.0, host - seen))

    def _paces(self, stage: int) -> list[float]:
        """Of the slowest rank at each place of a stage's sequence ranks."""
        ranks = [rank for rank, place in self._places() if place.pipefusion == stage]
        return [min(map(self.profile.pace, ranks[at :: len(self.plan.shares)])) for at in range(len(self.plan.shares))]

    def _added_operations(self, patched: bool) -> int:
        """Of one attention, by the plan."""
        soft, plan = self.profile.software, self.plan
        found = soft.ulysses * (plan.ulysses > 1) + soft.patched * patched
        return found + (soft.ring + (plan.ring - 1) * soft.ring_hop) * (plan.ring > 1)

    def _ulysses(self, layout: SequenceSplit) -> float:
        """Seconds of one block's all-to-alls (4 tensors: q, k, v there, the output back)."""
        if layout.ulysses == 1:
            return 0.0
        heads, kv = layout.head_counts(), layout.kv_counts()
        row = self.batch * self.model.head_dim * self.job.element

        def flows() -> Iterator[Flow]:
            for rank, place in self._places():
                tokens, one = layout.ulysses_tokens(place.ring), place.ulysses
                for other in range(layout.ulysses):
                    size = row * (tokens[one] * (heads[other] + 2 * kv[other]) + tokens[other] * heads[one])
                    yield rank, self.plan.rank_at(place._replace(ulysses=other)), size

        return transfer_seconds(flows(), self.profile.levels, self.profile.software.all_to_alls)

    def _ring(self, layout: SequenceSplit, attention: float, patched: bool) -> float:
        """Seconds of one block's hops that attention does not hide; patches send queries and outputs, not keys."""
        if layout.ring == 1:
            return 0.0
        heads, blocks = layout.head_counts() if patched else layout.kv_counts(), layout.ring_tokens()
        row = 2 * self.batch * self.model.head_dim * self.job.element

        def flows(hop: int) -> Iterator[Flow]:
            for rank, place in self._places():
                size = row * blocks[(place.ring - hop) % layout.ring] * heads[place.ulysses]
                yield rank, self.plan.rank_at(place._replace(ring=(place.ring + 1) % layout.ring)), size

        hidden = attention / layout.ring
        exposed = 0.0
        for hop in range(layout.ring - 1):
            taken = transfer_seconds(flows(hop), self.profile.levels)
            exposed += taken - self.profile.overlap * min(taken, hidden) + self.profile.software.hop
        return exposed

    def _places(self) -> Iterator[tuple[int, Place]]:
        return ((rank, self.plan.place(rank)) for rank in range(self.plan.world_size))

    def _stage_transfer(self, tokens: int) -> float:
        """Seconds to hand a patch's tokens to the next stage, all stages at once."""
        plan = self.plan
        if plan.pipefusion == 1:
            return 0.0
        size = self.batch * math.ceil(tokens / (plan.ring * plan.ulysses)) * self.model.hidden * self.job.element
        flows = (
            (rank, plan.rank_at(place._replace(pipefusion=(place.pipefusion + 1) % plan.pipefusion)), size)
            for rank, place in self._places()
        )
        return transfer_seconds(flows, self.profile.levels)

    def _cfg(self) -> float:
        """Seconds of the one exchange of predictions a step between the two branches."""
        plan = self.plan
        if plan.cfg == 1:
            return 0.0
        size = self.batch * self.job.image_tokens * self.model.channels * self.job.element
        flows = ((rank, plan.rank_at(place._replace(cfg=1 - place.cfg)), size) for rank, place in self._places())
        return transfer_seconds(flows, self.profile.levels)

    def _gather(self, block_seconds: float, stage: int) -> float:
        """Seconds of fetching weights, from other ranks or from the host, that do not hide behind the block before."""
        plan, blocks = self.plan, self.plan.stages[stage]
        held = self.model.weights(self.stage_starts[stage], blocks) * self.job.weight_element
        if plan.weights == "streamed":
            return self._stream(held, blocks * block_seconds, blocks)
        world = plan.world_size
        if plan.weights != "sharded" or world == 1:
            return 0.0
        size = held / blocks * (world - 1) / world
        taken = transfer_seconds(((rank, (rank + 1) % world, size) for rank in range(world)), self.profile.levels)
        return taken + (blocks - 1) * (taken - self.profile.overlap * min(taken, block_seconds))

    def _stream(self, held: float, seconds: float, blocks: int) -> float:
        """Seconds of copying the blocks that do not stay, beyond those of computing all of them."""
        device = self.profile.device
        _, least = self._memory()
        largest = max(self.model.double_weights, self.model.single_weights) * self.job.weight_element
        room = device.memory - least
        if room + 2 * largest >= held:
            return 0.0
        copied = held - max(0.0, room)
        return max(largest / device.host_bandwidth * (room < largest), copied / device.host_bandwidth - seconds)

    def _memory(self) -> tuple[float, float]:
        """Bytes of weights and of everything on the fullest rank."""
        found = needs(self.plan, self.model, self.job)
        return found.weights + found.gathered, found.weights + found.working + self._beside_the_model()

    def _beside_the_model(self) -> float:
        device = self.profile.device
        return device.context + (connections(self.plan) + rows_connections(self.plan)) * device.connection
