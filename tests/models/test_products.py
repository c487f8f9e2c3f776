"""Families in frequent use with ComfyUI's own forward: every product of ranks, shared weights, batches, bf16 and stale patches.

The oracle is ComfyUI's forward in one process. For stale patches that forward runs once a patch, with keys and values that this
file keeps by PipeFusion's rule. FLUX.1 through workers and samplers: tests/engine/test_products.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import Builder, Case, small
from parallel_backend.models.sequence_parallel.blocks import blocks_of
from parallel_backend.plan import ResolvedPlan
from tests.models.parallel_models import TOLERANCE, outputs_in_turn, share_weights, worst
from tests.support.pipefusion_simulation import patch_rows
from tests.support.ranks import run_in_turn
from tests.support.selection import thorough
from tests.support.tiny.models import draw

pytestmark = thorough

BEFORE: Mapping[str, Mapping[int, int]] = {
    "flux, references": {55: 7},
    "flux 2, zero-timestep reference": {567: 512},
    "chroma": {42: 7},
    "qwen-image": {42: 7},
    "qwen-image, masked text": {42: 7},
    "qwen-image-edit, zero-timestep references": {55: 7},
    "qwen-image-edit, negative index": {55: 7},
    "wan, text": {60: 0},
    "wan, image": {60: 0},
    "wan, reference frame": {80: 20},
    "wan 2.2, a timestep a frame": {60: 0},
    "vace, two controls": {60: 0},
    "z-image": {64: 0, 96: 32},
    "z-image, reference": {96: 32, 160: 96},
}
"""The number of tokens before the picture's tokens, by the token count of an attention. Attentions that are not listed have no
picture.
"""


@torch.no_grad()
def case_of(name: str, builder: Builder = Builder()) -> Case:  # noqa: B008 (frozen)
    return small(name, builder)


def products(case: Case, *, stages: bool) -> list[ResolvedPlan]:
    """Return all products of two, three and four ranks over ring, ulysses and, if the model has enough blocks, pipefusion."""
    most = blocks_of(case.model, case.declaration)[-1].unit + 1 if stages else 1
    return [
        plan_for(case, pipefusion=pipefusion, ring=ring, ulysses=ulysses, patches=1)
        for pipefusion, ring, ulysses in itertools.product(range(1, most + 1), range(1, 5), range(1, 5))
        if pipefusion * ring * ulysses in (2, 3, 4)
    ]


def doubled(case: Case) -> Case:
    """Return a batch of two. The second item differs in latent, time and all arguments except a mask.

    FLUX.2's guidance stays one for both: ComfyUI's forward accepts no more where references have a time of zero.
    """

    def two(value: Tensor) -> Tensor:
        other = -0.5 * value.flip(-1) if value.is_floating_point() else value
        return torch.cat([value, other]) if value.shape[0] == 1 else value

    time = torch.cat([case.timestep, 0.5 * case.timestep])
    once = {"guidance"} if case.kind == "Flux2" else set()
    given = {key: value if key in once else tree_map_only(Tensor, two, value) for key, value in case.arguments.items()}
    return replace(case, x=two(case.x), timestep=time, arguments=given)


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("sharded", [False, True])
def test_every_product_gives_the_models_own_result_also_with_sharded_weights(name: str, sharded: bool) -> None:
    """The batch has two items, which FLUX.1 with references does not accept."""
    case = case_of(name) if name.startswith("flux, ") else doubled(case_of(name))
    with torch.no_grad():
        expected = case.stock()
    plans = products(case, stages=not sharded)
    results = outputs_in_turn(case, plans, share_weights if sharded else lambda rank: None)
    for plan, outs in zip(plans, results, strict=True):
        assert worst(outs, expected) <= TOLERANCE, plan.describe()


def in_bf16(case: Case) -> Case:
    """Return a call as ComfyUI casts it to bf16: all but the time."""

    def cast(value: Tensor) -> Tensor:
        return value.bfloat16() if value.is_floating_point() else value

    return replace(case, x=cast(case.x), arguments=tree_map_only(Tensor, cast, dict(case.arguments)))


@pytest.mark.parametrize("name", BEFORE)
def test_bf16_is_as_near_to_fp32_as_comfyuis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank gives ComfyUI's bits, unless text is left out instead of masked. Several ranks are no further from fp32."""
    exact = case_of(name)
    case = in_bf16(case_of(name, Builder(torch.bfloat16)))
    with torch.no_grad():
        expected, stock = exact.stock(), case.stock()
        alone = ProofRank(case, plan_for(case)).run()
    assert alone is not None and stock.dtype == alone.dtype == torch.bfloat16
    allowed = 1.5 * worst([[stock.float()]], expected)
    if "attention_mask" not in case.arguments:
        assert torch.equal(alone, stock)
    plans = [plan_for(case, ring=2, ulysses=2), plan_for(case, pipefusion=2, ulysses=2, patches=1)]
    for plan, outs in zip(plans, outputs_in_turn(case, plans), strict=True):
        ours = worst([[out.float() for out in each] for each in outs], expected)
        print(f"{name}, {plan.degrees}: {ours:.5f}, ComfyUI {allowed / 1.5:.5f}")
        assert ours <= allowed, plan.describe()


@dataclass
class Stale:
    """PipeFusion's rule for ComfyUI's own forward: attention to the newest keys of all tokens; one patch's keys are new.

    `tokens` are the picture's tokens by patch. Tokens before and after the picture go with the first patch. The forward's
    output for other tokens than the patch's is wrong, and no test reads it.
    """

    before: Mapping[int, int]
    tokens: Sequence[Tensor]
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    patch: int | None = None
    calls: int = 0

    def __call__(
        self, kernel: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, *more: Any, **others: Any
    ) -> Tensor:
        tokens = -2 if others.get("skip_reshape") else 1
        length = k.shape[tokens]
        if q.shape[tokens] == length and length in self.before:
            self.calls += 1
            if self.patch is None:
                self.kept[self.calls] = k.clone(), v.clone()
            else:
                new = self._of(self.patch, length)
                for old, now in zip(self.kept[self.calls], (k, v), strict=True):
                    old.index_copy_(tokens, new, now.index_select(tokens, new))
            k, v = self.kept[self.calls]
        return kernel(q, k, v, heads, mask, *more, **others)  # type: ignore[no-any-return]

    def _of(self, patch: int, length: int) -> Tensor:
        start, count = self.before[length], sum(map(len, self.tokens))
        own = self.tokens[patch] + start
        return own if patch else torch.cat([torch.arange(start), own, torch.arange(start + count, length)])

    def forward(self, case: Case, patch: int | None = None) -> Tensor:
        """Run the whole call, which fills the cache, or a call in which one patch is new."""
        self.patch, self.calls = patch, 0
        out: Tensor = replace(case, options={"optimized_attention_override": self}).stock()
        assert self.calls
        return out


def by_patch(case: Case, patches: int) -> tuple[list[Tensor], list[slice]]:
    """Return each patch's tokens, and each patch's rows of the latent."""
    step = 1 if case.kind == "Flux2" else 2
    *_, height, width = case.x.shape
    grid = math.prod(case.x.shape[2:-2]), math.ceil(height / step), math.ceil(width / step)
    places = torch.arange(math.prod(grid)).view(grid)
    runs = patch_rows(grid[1], patches)
    return (
        [places[:, run.start : run.stop].flatten() for run in runs],
        [slice(run.start * step, run.stop * step) for run in runs],
    )


@torch.no_grad()
def simulated(steps: Sequence[Case], before: Mapping[int, int], patches: int) -> list[Tensor]:
    """Return the outputs of all steps: the first step whole, later steps patch by patch with the cached keys."""
    tokens, rows = by_patch(steps[0], patches)
    stale = Stale(before, tokens)
    outs = [stale.forward(steps[0])]
    for step in steps[1:]:
        outs.append(torch.cat([stale.forward(step, patch)[..., run, :] for patch, run in enumerate(rows)], dim=-2))
    return outs


PATCHED = ({}, {"pipefusion": 2}, {"ring": 2, "ulysses": 2}, {"pipefusion": 2, "ring": 2})


@pytest.mark.parametrize("patches", [2, 3])
@pytest.mark.parametrize("name", BEFORE)
def test_results_of_stale_patches_depend_only_on_their_number(name: str, patches: int) -> None:
    """A whole call and two calls by patches, of other latents and times, agree on one rank and on several."""
    first = case_of(name)
    times = (1.0, 0.8, 0.5)
    steps = [
        replace(
            first, x=draw(*first.x.shape, seed=20 + number), timestep=tree_map(lambda t, by=by: by * t, first.timestep)
        )
        for number, by in enumerate(times)
    ]
    expected = simulated(steps, BEFORE[name], patches)
    with torch.no_grad():
        assert worst([[expected[-1]]], steps[-1].stock()) > 10 * TOLERANCE, "nothing was stale"
    plans = [plan_for(first, patches=patches, **degrees) for degrees in PATCHED]

    def run(plan: ResolvedPlan) -> Any:
        def on_rank(_: int) -> list[Tensor]:
            rank, outs = ProofRank(first, plan), []
            for number, step in enumerate(steps):
                rank.case = step
                outs.append(rank.by_patch() if number else rank.run())
            return [out for out in outs if out is not None]

        return plan.world_size, on_rank

    for plan, ranks in zip(plans, run_in_turn([run(plan) for plan in plans]), strict=True):
        answered = [outs for outs in ranks if outs]
        assert answered
        for outs in answered:
            for out, right in zip(outs, expected, strict=True):
                assert worst([[out]], right) <= TOLERANCE, plan.describe()
