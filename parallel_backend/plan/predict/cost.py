"""The cost of a plan on a machine: seconds a step, part by part, and the memory of each rank.

At a collective all ranks wait for the slowest rank. So each phase takes as long as on the rank with the most tokens or heads.
The host starts operations ahead of the device: a pass over the blocks takes as long as the slower of the two.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...layout import HeadSlices, SequenceSplit, cut, length
from ..plan import ResolvedPlan
from .kernel_counts import CHUNK, FP8, FP8_TRAFFIC, PATCHED, RING, RING_HOP, ULYSSES
from .memory import branches_together, items, needed_by_rank, needs_by_rank
from .profiles import DenoiseJob, Level, ModelShape, Profile, expansion_of

FUSED_PASSES, FUSED_LAUNCH = 0.6, 0.16
"""Shares that torch.compile leaves of the passes over features, by a count by hand, and of an operation's host time (7 µs)."""

ADDED_LAUNCH = 0.7
"""Host time of an operation that a distributed attention adds, as a multiple of that of a block's operation."""

ALL_TO_ALLS = 2
"""All-to-alls of one attention."""

COLLECTIVE = 9
"""Host time of an all-to-all, as a number of operations: on an H200's host Ulysses 2 to 8 add 0.35 to 0.85 ms an attention."""

HOP_SECONDS = 99e-6
"""Seconds for which the device idles in each hop of Ring (fitted on Ring 2 of FLUX.1 on two H100)."""

MERGE_BYTES = 50
"""Bytes of traffic to merge one element of a partial attention."""

QUANTISING = 12
"""Further passes over a token's features in a block that rounds the inputs of its matmuls to the dtype of quantised weights."""

SCALE_BYTES = 4
"""Bytes of the scale of one head of a token in fp8 exchanges."""

Flow = tuple[int, int, float]
"""A transfer: (from rank, to rank, bytes)."""


@dataclass(frozen=True)
class StepCost:
    """The cost of a step, on average over the job, as parts in seconds, and the memory of each rank in bytes.

    Attributes:
        device: matmul, attention and memory traffic.
        ulysses: communication of Ulysses that does not overlap with the device's work.
        ring: communication of Ring that does not overlap.
        pipeline: waits of a pipeline stage for another stage.
        cfg: the exchange between the branches.
        gather: transfers of weights that do not overlap.
        launch: the time by which the host is slower than `device`, `ulysses`, `ring` and `gather` together.
        fill: the warm-up steps and the filling of the pipeline.
        rank_weights: bytes of weights on each rank.
        needed: bytes that each rank needs in total.
        free: bytes that each rank may use.
    """

    device: float
    ulysses: float
    ring: float
    pipeline: float
    cfg: float
    gather: float
    launch: float
    fill: float
    rank_weights: tuple[float, ...]
    needed: tuple[float, ...]
    free: tuple[float, ...]

    @property
    def tightest(self) -> int:
        """Return the rank that would have the least memory left; among ranks with equal free memory, the fullest."""
        return min(range(len(self.needed)), key=lambda rank: self.free[rank] - self.needed[rank])

    @property
    def memory(self) -> float:
        """Return the bytes that the tightest rank needs."""
        return self.needed[self.tightest]

    @property
    def weights(self) -> float:
        """Return the bytes of weights on the tightest rank."""
        return self.rank_weights[self.tightest]

    @property
    def allowance(self) -> float:
        """Return the bytes that the tightest rank may use."""
        return self.free[self.tightest]

    @property
    def fits(self) -> bool:
        """Return True if every rank has enough memory."""
        return self.fits_into(self.free)

    def fits_into(self, free: Sequence[float]) -> bool:
        """Return True if every rank has enough memory, given the free bytes of each rank."""
        return all(map(operator.le, self.needed, free))

    @property
    def seconds(self) -> float:
        """Return the seconds a step."""
        return self.device + self.communication + self.launch + self.fill

    @property
    def communication(self) -> float:
        """Return the seconds a step spent waiting for other ranks."""
        return self.ulysses + self.ring + self.pipeline + self.cfg + self.gather


def transfer_seconds(flows: Iterable[Flow], levels: tuple[Level, ...], messages: int = 1) -> float:
    """Return the seconds until all flows, which start together, have passed every port; 0 if nothing is sent.

    Args:
        flows: the transfers.
        levels: the links of the machine.
        messages: the number of messages after one another, each with the latency of the outermost level that is crossed.
    """
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


def cost(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile) -> StepCost:
    """Return the cost of a plan for a job on a machine."""
    if model.unsharded:
        return _unsharded_cost(plan, model, job, profile)
    return _Estimate(plan, model, job, profile).total()


def _unsharded_cost(plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile) -> StepCost:
    """Return the cost of forwards that each run on one rank: the slowest rank's time, and the exchange between branches.

    The memory of each rank is computed as for all other plans.
    """
    seconds = []
    for rank in range(plan.world_size):
        time, rows = profile.forwards[rank], plan.parts(job.batch)[plan.coordinates(rank).data]
        seconds.append(time.start + time.item * length(rows) * branches_together(plan, job))
    latent = 4.0 * math.ceil(job.batch / plan.data) * job.image_tokens * model.channels
    flows = [(0, 1, latent), (1, 0, latent)] if plan.cfg > 1 else []
    every = needs_by_rank(plan, model, job)
    return StepCost(
        device=max(seconds),
        **dict.fromkeys(("ulysses", "ring", "pipeline", "gather", "launch", "fill"), 0.0),
        cfg=transfer_seconds(flows, profile.levels),
        rank_weights=tuple(entry.weights + entry.gathered for entry in every),
        needed=needed_by_rank(plan, model, job, profile),
        free=tuple(map(profile.memory, range(plan.world_size))),
    )


@dataclass(frozen=True)
class _Pass:
    """The seconds of one pass of some image tokens through the blocks of one stage."""

    device: float
    ulysses: float
    ring: float
    gather: float
    launch: float

    @property
    def seconds(self) -> float:
        return self.device + self.ulysses + self.ring + self.gather + self.launch


class _Estimate:
    """The estimate of a plan's cost for one step of a job, part by part."""

    def __init__(self, plan: ResolvedPlan, model: ModelShape, job: DenoiseJob, profile: Profile) -> None:
        self.plan, self.model, self.job, self.profile = plan, model, job, profile
        self.batch = items(plan, job)
        self.text = job.text_tokens if model.joint_text else 0
        self.stage_starts = [sum(plan.stages[:stage]) for stage in range(plan.pipefusion)]
        self.coordinates = [plan.coordinates(rank) for rank in range(plan.world_size)]
        self.rank_weights = tuple(entry.weights + entry.gathered for entry in needs_by_rank(plan, model, job))
        self.needed = needed_by_rank(plan, model, job, profile)
        self.free = tuple(map(profile.memory, range(plan.world_size)))

    def total(self) -> StepCost:
        plan, job = self.plan, self.job
        whole = [self._pass(stage, job.image_tokens, self.text, False) for stage in range(plan.pipefusion)]
        cfg = self._cfg()
        if plan.patches == 1 and plan.pipefusion == 1:
            (only,) = whole
            seconds = only.device, only.ulysses, only.ring, 0, cfg, only.gather, only.launch, 0
            return StepCost(*seconds, self.rank_weights, self.needed, self.free)
        return self._piped(whole, cfg)

    def _piped(self, whole: list[_Pass], cfg: float) -> StepCost:
        """Return the cost of steps in patches.

        Each stage works without pause unless a patch's round trip through all stages takes longer than a stage's step.
        """
        plan, job = self.plan, self.job
        largest = max(length(run) for run in cut(job.image_tokens, plan.patches))
        first = [self._pass(stage, largest, self.text, True) for stage in range(plan.pipefusion)]
        later_passes = [self._pass(stage, largest, 0, True) for stage in range(plan.pipefusion)]
        hop = self._stage_transfer(largest + self.text)
        busy = [
            start.seconds + (plan.patches - 1) * rest.seconds for start, rest in zip(first, later_passes, strict=True)
        ]
        round_trip = sum(start.seconds for start in first) + plan.pipefusion * hop
        slowest = max(range(plan.pipefusion), key=lambda stage: busy[stage])
        step = max(busy[slowest], round_trip)
        warm_up = sum(stage.seconds for stage in whole) + plan.pipefusion * self._stage_transfer(
            job.image_tokens + self.text
        )
        warm_steps = min(plan.warmup_steps, job.steps)
        steady = 1 - warm_steps / job.steps

        def part(name: str) -> float:
            patches = (plan.patches - 1) * getattr(later_passes[slowest], name)
            return float(getattr(first[slowest], name) + patches) * steady

        fill = (warm_steps * warm_up + (round_trip - round_trip / plan.pipefusion) * bool(steady)) / job.steps
        return StepCost(
            device=part("device"),
            ulysses=part("ulysses"),
            ring=part("ring"),
            pipeline=(step - busy[slowest]) * steady,
            cfg=cfg,
            gather=part("gather"),
            launch=part("launch"),
            fill=fill,
            rank_weights=self.rank_weights,
            needed=self.needed,
            free=self.free,
        )

    def _pass(self, stage: int, image: int, text: int, patched: bool) -> _Pass:
        """Return the seconds of one pass through a stage.

        Args:
            stage: the stage's number.
            image: the image tokens of the pass.
            text: the text tokens of the pass.
            patched: the pass is of a patch, so all other keys and values come from the stage's cache.
        """
        model, job, device = self.model, self.job, self.profile.device
        blocks = self.plan.stages[stage]
        sizes = self.plan.ring, self.plan.ulysses
        layout = SequenceSplit.of((text, image), model.heads, *sizes, self.plan.shares, model.kv_heads)
        paces = self._paces(stage)
        tokens = self.batch * max(map(operator.truediv, layout.tokens, paces))  # scaled to a rank of pace 1
        attended = itertools.product(layout.ring_tokens(), layout.head_counts())
        rows = self.batch * max(q * heads / pace for (q, heads), pace in zip(attended, paces, strict=True))
        keys = job.image_tokens + self.text
        matmul = 2 * tokens * model.token_weights / device.matmul_rate(job.multiplied)
        scores = 4 * rows * keys * model.head_dim
        crossed = 0 if model.joint_text else 4 * tokens * job.text_tokens * model.hidden
        runs = layout.head_chunks(self.plan.head_chunks)
        attentions = self._by_chunk(layout, runs, scores / device.attention_rate)
        attention = sum(attentions)
        passes = (model.passes + QUANTISING * (job.multiplied in device.quantised)) * (
            FUSED_PASSES if self.profile.compiled else 1
        )
        traffic = passes * tokens * model.hidden * job.element
        merges = rows * model.head_dim * MERGE_BYTES * self.plan.ring * model.attentions if self.plan.ring > 1 else 0
        packing = 4 * tokens * model.hidden * FP8_TRAFFIC * self.plan.exchanges_approximately * model.attentions
        memory = (traffic + merges + packing) / device.bandwidth
        ulysses = model.attentions * self._ulysses(layout, runs, attentions)
        ring = model.attentions * self._ring(layout, attention, patched)
        expansion = job.expansion
        if job.multiplied and job.multiplied not in device.quantised:  # this device expands them
            expansion += expansion_of(job.weight_element, job.element, unpacked=False)
        expanded = model.weights(self.stage_starts[stage], blocks) / blocks * expansion / device.bandwidth
        own = matmul + model.attentions * attention + crossed / device.attention_rate + memory + expanded
        gather = self._gather(own + ulysses + ring, stage)
        own_operations = model.operations(self.stage_starts[stage], blocks) * (
            FUSED_LAUNCH if self.profile.compiled else 1
        )
        added = ADDED_LAUNCH * model.attentions * blocks * self._added_operations(patched)
        host = device.launch * (own_operations + added)
        seen = blocks * (own + ulysses + ring) + gather
        return _Pass(blocks * own, blocks * ulysses, blocks * ring, gather, max(0.0, host - seen))

    def _paces(self, stage: int) -> list[float]:
        """Return the pace of the slowest world rank at each sequence rank of a stage."""
        ranks = self.plan.stage_ranks(stage)
        return [min(map(self.profile.pace, ranks[at :: len(self.plan.shares)])) for at in range(len(self.plan.shares))]

    def _added_operations(self, patched: bool) -> int:
        """Return the number of operations that the plan adds to one attention."""
        plan = self.plan
        all_to_alls = (COLLECTIVE - 1) * ALL_TO_ALLS * plan.head_chunks
        count = (ULYSSES + (plan.head_chunks - 1) * CHUNK + all_to_alls) * (plan.ulysses > 1) + PATCHED * patched
        count += FP8 * plan.head_chunks * plan.exchanges_approximately
        return count + (RING + (plan.ring - 1) * RING_HOP) * (plan.ring > 1)

    def _by_chunk(self, layout: SequenceSplit, runs: Sequence[Sequence[HeadSlices]], attention: float) -> list[float]:
        """Return the seconds of attention for each chunk of heads.

        A chunk may take more than its part, because few heads do not fill a device.

        Args:
            layout: the split of tokens and heads.
            runs: the heads of each rank in each chunk.
            attention: the seconds of attention for all heads at once.
        """

        def waves(heads: int) -> int:
            return math.ceil(self.batch * max(layout.ring_tokens()) * heads / self.profile.device.wave)

        whole = max(1, waves(max(layout.head_counts())))
        return [attention * waves(max(length(run.q) for run in chunk)) / whole for chunk in runs]

    def _ulysses(
        self, layout: SequenceSplit, runs: Sequence[Sequence[HeadSlices]], attentions: Sequence[float]
    ) -> float:
        """Return the seconds of one attention's all-to-alls that do not overlap with the attention of other chunks.

        The all-to-alls send q, k and v before attention, and the output back after it.
        """
        if layout.ulysses == 1:
            return 0.0
        row = self.batch * self._row()

        def flows(chunk: Sequence[HeadSlices], back: bool) -> Iterator[Flow]:
            heads, kv = [length(run.q) for run in chunk], [length(run.kv) for run in chunk]
            for rank, coordinates in enumerate(self.coordinates):
                tokens, index = layout.ulysses_tokens(coordinates.ring), coordinates.ulysses
                for peer in range(layout.ulysses):  # peers have neighbouring numbers
                    size = tokens[peer] * heads[index] if back else tokens[index] * (heads[peer] + 2 * kv[peer])
                    yield rank, rank - index + peer, row * size

        levels = self.profile.levels
        if len(runs) == 1:
            both = (flow for back in (False, True) for flow in flows(runs[0], back))
            return transfer_seconds(both, levels, ALL_TO_ALLS)
        there, back = ([transfer_seconds(flows(chunk, way), levels) for chunk in runs] for way in (False, True))
        exposed = there[0] + back[-1]
        for arriving, leaving, attention in zip((*there[1:], 0.0), (0.0, *back[:-1]), attentions, strict=True):
            moved = arriving + leaving
            exposed += moved - self.profile.overlap * min(moved, attention)
        return exposed

    def _row(self) -> int:
        """Return the bytes of one head of one token as attention sends them."""
        width = self.model.head_dim
        return width + SCALE_BYTES if self.plan.exchanges_approximately else width * self.job.element

    def _ring(self, layout: SequenceSplit, attention: float, patched: bool) -> float:
        """Return the seconds of one block's hops that do not overlap with attention.

        Patches send queries and outputs instead of keys and values.
        """
        if layout.ring == 1:
            return 0.0
        heads, blocks = layout.head_counts() if patched else layout.kv_counts(), layout.ring_tokens()
        row = 2 * self.batch * self._row()

        def flows(hop: int) -> Iterator[Flow]:
            for rank, coordinates in enumerate(self.coordinates):
                size = row * blocks[(coordinates.ring - hop) % layout.ring] * heads[coordinates.ulysses]
                yield rank, self.plan.rank_at(coordinates._replace(ring=(coordinates.ring + 1) % layout.ring)), size

        hidden = attention / layout.ring
        exposed = 0.0
        for hop in range(layout.ring - 1):
            hop_seconds = transfer_seconds(flows(hop), self.profile.levels)
            exposed += hop_seconds - self.profile.overlap * min(hop_seconds, hidden) + HOP_SECONDS
        return exposed

    def _stage_transfer(self, tokens: int) -> float:
        """Return the seconds to send a patch's tokens to the next stage, when all stages send at once."""
        plan = self.plan
        if plan.pipefusion == 1:
            return 0.0
        size = self.batch * math.ceil(tokens / (plan.ring * plan.ulysses)) * self.model.hidden * self.job.element
        flows = (
            (rank, plan.rank_at(coordinates._replace(pipefusion=(coordinates.pipefusion + 1) % plan.pipefusion)), size)
            for rank, coordinates in enumerate(self.coordinates)
        )
        return transfer_seconds(flows, self.profile.levels)

    def _cfg(self) -> float:
        """Return the seconds of the exchange of predictions between the two branches, once a step."""
        plan = self.plan
        if plan.cfg == 1:
            return 0.0
        size = self.batch * self.job.image_tokens * self.model.channels * self.job.element
        flows = (
            (rank, plan.rank_at(coordinates._replace(cfg=1 - coordinates.cfg)), size)
            for rank, coordinates in enumerate(self.coordinates)
        )
        return transfer_seconds(flows, self.profile.levels)

    def _gather(self, block_seconds: float, stage: int) -> float:
        """Return the seconds of fetching weights, from other ranks or the host, that do not overlap with the previous block."""
        plan, blocks = self.plan, self.plan.stages[stage]
        stage_weights = self.model.weights(self.stage_starts[stage], blocks) * self.job.weight_element
        if plan.weights == "streamed":
            return self._stream(stage_weights, blocks * block_seconds, stage)
        ranks = plan.world_size
        if plan.weights != "sharded" or ranks == 1:
            return 0.0
        size = stage_weights / blocks * (ranks - 1) / ranks
        transfer = transfer_seconds(((rank, (rank + 1) % ranks, size) for rank in range(ranks)), self.profile.levels)
        return transfer + (blocks - 1) * (transfer - self.profile.overlap * min(transfer, block_seconds))

    def _stream(self, stage_weights: float, seconds: float, stage: int) -> float:
        """Return the seconds of copying the blocks that do not stay on the device, beyond the seconds of all blocks' compute."""
        device = self.profile.device
        largest = max(self.model.double_weights, self.model.single_weights) * self.job.weight_element
        spare = min(self.free[rank] - self.needed[rank] for rank in self.plan.stage_ranks(stage))
        if spare + 2 * largest >= stage_weights:
            return 0.0
        copied = stage_weights - max(0.0, spare)
        return max(largest / device.host_bandwidth * (spare < largest), copied / device.host_bandwidth - seconds)
