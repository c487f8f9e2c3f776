"""The cost model: bytes, monotonicity, uneven cuts, memory, the table and its refusals."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from parallel_backend.errors import Refused
from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.choose import best, is_approximate, rank, table
from parallel_backend.plan.predict.cost import HOP_SECONDS, cost, transfer_seconds
from parallel_backend.plan.predict.known_machines import profile, profile_names
from parallel_backend.plan.predict.known_models import known_model
from parallel_backend.plan.predict.profiles import DenoiseJob, Level, Profile
from tests.plan.jobs import FLUX, JOB, plan, plans, with_memory
from tests.support.selection import thorough
from tests.support.sent_bytes import ring_bytes, ulysses_bytes


def faster_links(base: Profile, factor: float) -> Profile:
    return replace(base, levels=tuple(replace(level, bandwidth=level.bandwidth * factor) for level in base.levels))


@pytest.mark.parametrize(("axis", "formula"), [("ulysses", ulysses_bytes), ("ring", ring_bytes)])
def test_even_plans_take_as_long_as_their_bytes(axis: str, formula: object) -> None:
    machine = profile("h100")
    slow = replace(machine, levels=(Level(8, 1e9, 0.0),), overlap=0.0)
    seconds = getattr(cost(plan(**{axis: 4}), FLUX, JOB, slow), axis)
    seconds -= 3 * HOP_SECONDS * FLUX.blocks * (axis == "ring")
    degrees = {"ring": 1, "ulysses": 1, axis: 4}
    assert callable(formula)
    assert seconds == pytest.approx(formula(4608, 3072, 57, 2, **degrees) / 1e9)


def test_transfers_share_the_bandwidth_of_the_levels_that_they_cross() -> None:
    levels = (Level(2, 10.0, 0.5), Level(4, 10.0, 1.0))
    assert transfer_seconds([(0, 1, 20.0), (1, 0, 20.0)], levels) == 2.5
    assert transfer_seconds([(0, 2, 20.0), (1, 3, 20.0)], levels) == 5.0
    assert transfer_seconds([(0, 2, 20.0), (1, 3, 20.0)], levels, messages=3) == 7.0
    assert transfer_seconds([(0, 0, 20.0), (1, 2, 0.0)], levels) == 0.0


# cards differ in numbers alone, so the quick run has every fourth
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[thorough] * (place % 4 > 0)) for place, name in enumerate(profile_names())]
)
def test_a_better_machine_or_a_smaller_job_is_never_slower(name: str) -> None:
    machine = profile(name)
    device = machine.device
    better = [
        faster_links(machine, 2.0),
        replace(machine, levels=tuple(replace(level, latency=level.latency / 2) for level in machine.levels)),
        replace(machine, overlap=1.0),
        *(
            replace(machine, device=replace(device, **{field: 2 * getattr(device, field)}))
            for field in ("matmul", "attention", "bandwidth")
        ),
        replace(machine, device=replace(device, launch=device.launch / 2)),
    ]
    job = replace(JOB, has_uncond=True)
    for each in plans(8, has_uncond=True):
        now = cost(each, FLUX, job, machine).seconds
        assert all(cost(each, FLUX, job, other).seconds <= now * (1 + 1e-9) for other in better), each.describe()
        assert cost(each, FLUX, replace(job, image_tokens=5000), machine).seconds >= now * (
            1 - 1e-9
        )  # equal where the host is slower


def test_an_uneven_cut_costs_the_time_of_its_slowest_rank() -> None:
    machine = faster_links(profile("h100"), 1e9)
    fast = replace(machine, device=replace(machine.device, launch=0.0))
    cog = known_model("cogvideox-2b").shape
    job = DenoiseJob(image_tokens=4096, text_tokens=0)
    even = cost(plan(ulysses=8), FLUX, job, fast).device
    assert even == pytest.approx(cost(plan(), FLUX, job, fast).device / 8)
    assert cost(plan(ulysses=8), FLUX, replace(job, image_tokens=4097), fast).device > even * (1 + 1 / 600)
    # 30 heads on 8 ranks: the slowest computes 4, 1.067 times an even share
    only_attention = replace(fast, device=replace(fast.device, matmul=1e30, bandwidth=1e30))
    eight = msgspec.structs.replace(plan(ulysses=8), stages=(30,))
    attention = 4 * 4096**2 * 4 * cog.head_dim * 30 / only_attention.device.attention_rate
    assert cost(eight, cog, job, only_attention).device == pytest.approx(attention, rel=1e-6)


def test_a_pipeline_in_patches_is_idle_only_while_it_fills() -> None:
    machine = faster_links(profile("h100"), 1e9)
    machine = replace(
        machine,
        device=replace(machine.device, launch=0.0),
        levels=tuple(replace(level, latency=0.0) for level in machine.levels),
    )
    job = DenoiseJob(image_tokens=4096, text_tokens=0, steps=1000)
    model = replace(FLUX, double_blocks=0, single_blocks=56)
    four = msgspec.structs.replace(plan(pipefusion=4), stages=(14, 14, 14, 14))
    one = msgspec.structs.replace(plan(), stages=(56,))
    piped, alone = cost(four, model, job, machine), cost(one, model, job, machine)
    assert piped.pipeline == pytest.approx(0, abs=1e-9)
    assert piped.device / 0.999 == pytest.approx(alone.device / 4)
    assert piped.fill * job.steps == pytest.approx(alone.device + 3 / 4 * alone.device / 4)


def test_streamed_weights_use_the_free_memory_and_are_copied_during_compute() -> None:
    streamed, machine = plan(ulysses=2, weights="streamed"), profile("4090")
    largest, others = 2 * FLUX.double_weights, 2 * FLUX.other_weights
    found = [cost(streamed, FLUX, JOB, with_memory(machine, memory)) for memory in (3e9, 6e9, 40e9)]
    assert {cost.weights for cost in found} == {2 * largest + others}
    assert found[0].gather > found[1].gather > found[2].gather == 0
    copied = 2 * FLUX.weights(0, FLUX.blocks) / machine.device.host_bandwidth
    compute = found[0].device + found[0].ulysses
    nearly_none = cost(streamed, FLUX, JOB, with_memory(machine, found[0].memory))
    assert nearly_none.gather == pytest.approx(max(largest / machine.device.host_bandwidth, copied - compute))


def test_streamed_weights_are_proposed_where_nothing_else_fits() -> None:
    machine = with_memory(profile("4090"), 6e9)
    kinds = ({"pipefusion": 0}, {"weights": "sharded"}, {"weights": "streamed"})
    others = [found for kind in kinds for found in plans(2, **{"pipefusion": 1, **kind})]
    with pytest.raises(
        Refused, match=r"each has 6\.00 GB free: use .* 2 with weights streamed, which needs [\d.]+ GB[.,]"
    ):
        best(plans(2, pipefusion=1), FLUX, JOB, machine, alternatives=others)
    with pytest.raises(Refused, match=r"use (pipefusion 2|.* 2 with weights sharded), which needs"):
        best(plans(2, pipefusion=1), FLUX, JOB, with_memory(machine, 20e9), alternatives=others)


def test_sharded_weights_are_gathered_during_compute_if_links_are_fast() -> None:
    machine = profile("h100")
    sharded, whole = plan(ulysses=8, weights="sharded"), plan(ulysses=8)
    job = DenoiseJob(image_tokens=16384, text_tokens=512)
    fast, slow = cost(sharded, FLUX, job, machine), cost(sharded, FLUX, job, faster_links(machine, 0.01))
    assert fast.memory < cost(whole, FLUX, job, machine).memory / 2
    assert fast.gather < 0.1 * fast.seconds < slow.gather


def test_chunks_of_heads_hide_the_exchange_behind_attention_and_take_longer_if_they_do_not_fill_the_device() -> None:
    free = replace(profile("h100"), levels=(Level(8, 1e11, 0.0),))
    free = replace(free, device=replace(free.device, launch=0.0, wave=1))
    job = DenoiseJob(image_tokens=100_000, text_tokens=0)  # attention takes longer than the exchange
    whole = plan(ulysses=4)
    for chunks in (2, 3):
        alone, cut = (
            cost(each, FLUX, job, free) for each in (whole, msgspec.structs.replace(whole, head_chunks=chunks))
        )
        assert cut.ulysses == pytest.approx(alone.ulysses / chunks)
        assert cut.device == pytest.approx(alone.device)
    slow = replace(free, levels=(Level(8, 1e6, 0.0),))  # the exchange takes longer than attention
    alone, cut = (cost(each, FLUX, job, slow) for each in (whole, msgspec.structs.replace(whole, head_chunks=2)))
    own = replace(slow, device=replace(slow.device, matmul=1e30, bandwidth=1e30))
    assert alone.ulysses - cut.ulysses == pytest.approx(cost(whole, FLUX, job, own).device)
    machine, eighth = (
        profile("h100"),
        plan(ulysses=8),
    )  # three heads of 4608 queries are not quite enough to fill the device
    filled, late = (cost(msgspec.structs.replace(eighth, head_chunks=chunks), FLUX, JOB, machine) for chunks in (1, 3))
    attention = 4 * 4608**2 * 3 * FLUX.head_dim / machine.device.attention_rate * FLUX.blocks
    assert late.device - filled.device == pytest.approx(2 * attention)


def test_chunks_are_chosen_if_they_are_faster() -> None:
    def chosen(found: ResolvedPlan, machine: Profile, job: DenoiseJob = JOB) -> ResolvedPlan:
        (entry,) = rank([found], FLUX, job, machine)
        assert entry.breakdown == cost(entry.plan, FLUX, job, machine)
        return entry.plan

    video, slow = DenoiseJob(image_tokens=50_000, text_tokens=512), profile("l40")
    assert chosen(plan(ulysses=4), slow, video).head_chunks == 4
    assert "heads exchanged in 4 chunks" in chosen(plan(ulysses=4), slow, video).describe()
    assert chosen(plan(ulysses=4), profile("h100")).head_chunks == 1  # a picture's few heads do not fill the device
    two_heads = replace(FLUX, kv_heads=2)
    (entry,) = rank([plan(ulysses=2)], two_heads, video, slow)
    assert entry.plan.head_chunks == 1  # each rank has one group of heads
    for kept in (plan(ring=2, ulysses=2), plan(ring=4), plan(ulysses=2, pipefusion=2), plan()):
        assert chosen(kept, slow, video) == kept


@pytest.mark.parametrize("axis", ["ulysses", "ring"])
def test_an_exchange_in_fp8_sends_half_and_packs(axis: str) -> None:
    machine = profile("h100")
    slow = replace(machine, levels=(Level(8, 1e5, 0.0),), overlap=0.0)
    exact, fp8 = (plan(**{axis: 4, "exchange": exchange}) for exchange in ("exact", "fp8"))
    sent = [getattr(cost(each, FLUX, JOB, slow), axis) for each in (exact, fp8)]
    assert sent[1] / sent[0] == pytest.approx((128 + 4) / 256, rel=1e-4)
    assert cost(fp8, FLUX, JOB, slow).device > cost(exact, FLUX, JOB, slow).device
    assert fp8.describe().endswith("exchange fp8 (approximate)")
    assert "exchange fp8: changes the picture" in table(rank([fp8], FLUX, JOB, machine))
    alone = plan(exchange="fp8")  # exchanges nothing
    assert "fp8" not in alone.describe() and cost(alone, FLUX, JOB, machine) == cost(plan(), FLUX, JOB, machine)


def test_the_time_with_compiled_blocks_is_shown_and_compile_recommended_from_30_percent_gain() -> None:
    machine = profile("h100")
    small, large = JOB, replace(JOB, image_tokens=65536)
    for job, recommended in ((small, True), (large, False)):
        choice = best([plan(ulysses=4)], FLUX, job, machine)
        (entry,) = choice.ranking
        assert entry.compiled is not None
        compiled = replace(machine, compiled=True)
        (itself,) = rank([plan(ulysses=4)], FLUX, job, compiled)
        assert entry.compiled == itself.seconds < entry.seconds
        assert (entry.seconds / entry.compiled > 1.3) == recommended
        assert ("choose compile on" in choice.why) == recommended
        assert f"{1e3 * entry.compiled:.1f}" in table(choice.ranking) and "compiled" not in table([itself])


def test_cfg_over_ranks_halves_the_batch_for_one_exchange() -> None:
    machine = profile("h100")
    both = cost(plan(), FLUX, replace(JOB, has_uncond=True), machine)
    split = cost(plan(cfg=2), FLUX, replace(JOB, has_uncond=True), machine)
    assert split.device == pytest.approx(both.device / 2)
    assert 0 < split.cfg < 0.01 * split.device


def test_models_of_diffusers_have_as_many_parameters_as_their_names_say_and_the_expected_numbers_of_tokens() -> None:
    expected = {"cogvideox-5b": (5.57, 0.01), "cogvideox-2b": (1.69, 0.03), "pixart-alpha": (0.61, 0.02)}
    for name, (billions, off) in expected.items():
        assert known_model(name).shape.parameters / 1e9 == pytest.approx(billions, rel=off)
    assert FLUX.image_tokens(1024, 1024) == 4096
    assert FLUX.image_tokens(1000, 1000) == 63 * 63
    assert known_model("cogvideox-5b").shape.image_tokens(720, 480, 49) == 13 * 45 * 30
    assert known_model("cogvideox1.5-5b").shape.image_tokens(1360, 768, 161) == 21 * 85 * 48


def test_a_refusal_names_the_numbers_or_the_choices() -> None:
    small = with_memory(profile("h100"), 16e9)
    with pytest.raises(
        Refused, match=r"needs \d+\.\d+ GB on each GPU \(23\.\d+ GB of it weights\), and each has 16\.00 GB free"
    ):
        best(plans(4, pipefusion=1), FLUX, JOB, small)
    with pytest.raises(
        Refused,
        match=r"^Only PipeFusion fits into 16\.00 GB \(pipefusion 4 needs [\d.]+ GB\), .* choose preset slow links",
    ):
        best(plans(4), FLUX, JOB, small)
    assert best(plans(4), FLUX, JOB, small, approximate=True).plan.pipefusion == 4
    with pytest.raises(Refused, match="no plan works"):
        best([], FLUX, JOB, profile("h100"))
    with pytest.raises(Refused, match="h100"):
        profile("tpu")
    with pytest.raises(Refused, match="flux-dev"):
        known_model("another")


def test_plans_that_change_the_picture_are_ranked_but_not_chosen() -> None:
    machine = profile("l40")
    choice = best(plans(8), FLUX, JOB, machine)
    assert is_approximate(choice.ranking[0].plan) and not is_approximate(choice.plan)
    assert "changes the picture slightly: choose preset slow links" in choice.why
    assert best(plans(8), FLUX, JOB, machine, approximate=True).plan == choice.ranking[0].plan
    patches_alone = plans(1, patches=4)
    assert all(is_approximate(each) for each in patches_alone)


def test_links_decide_and_the_reason_says_when_one_device_is_faster() -> None:
    slow = faster_links(profile("4090"), 0.05)
    choice = best(plans(2, pipefusion=1), FLUX, JOB, with_memory(slow, 48e9))
    assert choice.single.seconds < choice.ranking[0].seconds
    assert choice.why.startswith("One device is faster: ")
    assert "is waiting for its" in choice.why
    inside = best(plans(8), FLUX, JOB, profile("h100"))
    across = best(plans(16, has_uncond=True), FLUX, replace(JOB, has_uncond=True), profile("a100-10gbit"))
    assert (inside.plan.ulysses, across.plan.cfg) == (8, 2)
    fine = best(plans(2, pipefusion=1), FLUX, JOB, profile("h100"))
    assert "x as fast as one device" in fine.why
    cannot = best(plans(8, pipefusion=1, weights="sharded"), FLUX, JOB, profile("4090"))
    assert "one device cannot hold the job" in cannot.why
