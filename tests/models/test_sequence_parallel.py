"""A model's own forward with its tokens divided over ranks, against that forward in one process."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from msgspec.structs import replace as redeclare
from torch import Tensor
from torch.utils._pytree import tree_map

from parallel_backend.declaration import Declaration, Replicated
from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.small import SMALL, Case, small
from parallel_backend.models.comfyui.small.case import text
from parallel_backend.models.sequence_parallel.blocks import blocks_of
from parallel_backend.models.sequence_parallel.picture import Picture, as_patch_size
from parallel_backend.plan import ResolvedPlan
from tests.models.parallel_models import PLANS, TOLERANCE, outputs, outputs_in_turn, outputs_of_each, worst
from tests.support.classes import lacking, small_or_skipped
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.tiny.models import draw

IN_TURN = ("ring 2, ulysses 2", "3 patches over 2 stages, ulysses 2", "ring 2, ulysses 2, unequal")
"""Plans of four ranks, of which the quick run has one for each case of a model. The first divides keys (Ring) and heads
(Ulysses), the second heads, stages and patches.
"""
WHOLE_PICTURE = (
    "chroma radiance",
    "wan animate 2",
    "wan animate 2, no poses",
    "qwen-image 2.1",
    "qwen-image 2.1, references",
)
"""Cases that do not support PipeFusion."""
Change = Callable[[Case], Declaration]
"""A function that returns another declaration for a case."""

ZERO, UNCALLED = "timestep_zero_index", "calls attention more than 0 times"
UNSUPPORTED = "of the model's .* is not supported with a parallel MODEL: "
LATER = {
    "boogu": "boogu, reference",
    "cosmos-predict2": "cosmos-predict2, a timestep a frame",
    "flux, references by index": "flux, references",
    "hidream": "hidream, a picture to edit",
    "humo": "humo, reference",
    "humo, no sound": "humo, reference",
    "hunyuan image, refiner": "hunyuan image, refiner, masked text",
    "hunyuan video": "hunyuan video, first frame, masked text",
    "hunyuan video, first frame": "hunyuan video, first frame, masked text",
    "hunyuan video, masked text": "hunyuan video, first frame, masked text",
    "joyimage": "joyimage, references",
    "kandinsky 5": "kandinsky 5, first frame",
    "krea 2": "krea 2, zero-timestep references",
    "lens": "lens, masked text",
    "ltx-2, a timestep a frame": "ltx-2.3, reference sound, a timestep a frame",
    "ltx-2, neither hears the other": "ltx-2, no picture from the sound",
    "ltx-2, reference sound": "ltx-2.3, reference sound, a timestep a frame",
    "ltx-2.3": "ltx-2.3, reference sound, a timestep a frame",
    "ltxv": "ltxv, masked text and a timestep a token",
    "mage-flow": "mage-flow, references",
    "omnigen 2": "omnigen 2, references",
    "qwen-image-edit, references": "qwen-image-edit, negative index",
    "sd 3": "sd 3.5 medium",
    "skyreels": "skyreels, masked text",
    "wan, camera": "wan 2.2, camera",
    "wan animate, no faces": "wan animate",
}
"""Cases that are left to `--all`. The value of each is a quick case with the same blocks and at least the same streams and
inputs.
"""

FREED = ("flux", "wan, text", "minimax-h3")
"""Cases whose garbage the quick run checks after a forward."""
ONCE = {name.partition(",")[0]: name for name in reversed([*SMALL]) if name not in LATER}.values()
"""The first case of each model in the quick run."""


FORKED = 12
"""Number of cases for which the quick run forks ranks once. A fork takes longer than the forward of a small model."""


def plans_of(name: str) -> list[str]:
    """Return the plans that a case supports."""
    return [plan for plan, degrees in PLANS.items() if name not in WHOLE_PICTURE or "pipefusion" not in degrees]


def quick_plan(name: str) -> str:
    """Return the plan under which the quick run has a case.

    A model's only case has the second plan of IN_TURN, which divides stages and patches too. Several cases have the plans in
    turn.
    """
    of_model = [other for other in SMALL if other.partition(",")[0] == name.partition(",")[0]]
    plan = IN_TURN[1] if len(of_model) == 1 else IN_TURN[of_model.index(name) % len(IN_TURN)]
    return plan if plan in plans_of(name) else IN_TURN[0]


def several() -> Iterator[ParameterSet]:
    """Yield the cases of the quick run, each with its plan, in lists of FORKED."""
    calls = [(name, quick_plan(name)) for name in SMALL if name not in LATER and name not in lacking()]
    for start in range(0, len(calls), FORKED):
        some = calls[start : start + FORKED]
        yield pytest.param(some, id=f"{some[0][0]} to {some[-1][0]}")


@pytest.fixture(scope="module")
def case() -> Callable[[str], tuple[Case, Tensor]]:
    """Return a function that gives a case and ComfyUI's own output. Only the last case is cached, as forking copies memory."""

    @functools.lru_cache(maxsize=1)
    def get(name: str) -> tuple[Case, Tensor]:
        with torch.no_grad():
            found = small_or_skipped(name)
            return found, found.stock()

    return get


# This test is the first for each model: it reads the sources of the model's classes, which ranks that are forked later inherit.
# The quick run has one case of each model. test_several_cases_give_their_own_results has the values of the other cases.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[thorough] * (name not in ONCE)) for name in SMALL])
def test_one_rank_computes_the_same_bits_and_a_later_step_is_as_exact(name: str, case: Any) -> None:
    """Ranks use ComfyUI's own attention. Masked text is left out instead of being attended to with a weight of zero.

    A guide that is weighed goes by its weights instead of a mask.

    Values that are kept for a run, such as positions, depend neither on the latent nor on the time.
    """
    found, expected = case(name)
    rank = run_alone(found)
    out = rank.run()
    assert out is not None
    if {"attention_mask", "guide_attention_entries"} & found.arguments.keys():
        assert worst([[out]], expected) <= TOLERANCE
    else:
        assert torch.equal(out, expected)
    rank.case = later = replace(
        found, x=found.x * 0.7, timestep=tree_map(lambda timestep: timestep * 0.5, found.timestep)
    )
    with torch.no_grad():
        expected = later.stock()
    assert worst([[rank.run()]], expected) <= TOLERANCE


@pytest.mark.parametrize("name", [pytest.param(name, marks=[thorough] * (name not in FREED)) for name in SMALL])
def test_tensors_of_a_forward_are_freed_without_garbage_collection(
    case: Callable[[str], tuple[Case, Tensor]], name: str
) -> None:
    """The garbage collector knows nothing of a full GPU, so nothing may wait for it."""
    found, _ = case(name)

    def tensors_left(rank: int) -> int:
        one = ProofRank(found, plan_for(found, ring=2))
        one.run()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        one.run()
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.garbage)

    assert run_ranks(2, tensors_left) == [0, 0]


def count_gathers(rank: ProofRank) -> None:
    """Assert that each call gathers each latent once, at the end: operations between a model's blocks need no other rank."""
    run = rank.run

    def counted(patch: int | None = None, **changed: Any) -> Tensor | None:
        out, gathers = run(patch, **changed), rank.forward.gathers
        assert patch is not None or gathers == (rank.case.gathers if out is not None else 0), gathers
        return out

    rank.run = counted  # type: ignore[method-assign]


@thorough  # the next test has one plan of each case
@pytest.mark.parametrize("name", SMALL)
def test_every_split_gives_the_models_own_result(name: str, case: Any) -> None:
    """The whole call equals ComfyUI's, and so does each patch. A video that is packed with its sound passes the stages whole."""
    found, expected = case(name)
    plans = plans_of(name)
    results = outputs_in_turn(found, [planned(found, plan) for plan in plans], count_gathers)
    errors = {plan: worst(outs, expected) for plan, outs in zip(plans, results, strict=True)}
    assert max(errors.values()) <= TOLERANCE, errors


def planned(found: Case, plan: str) -> ResolvedPlan:
    """Return a plan of PLANS for a case."""
    return plan_for(found, **PLANS[plan] | ({"patches": 1} if len(found.shapes) > 1 else {}))


@pytest.mark.parametrize("calls", [*several()])
def test_several_cases_give_their_own_results(calls: list[tuple[str, str]]) -> None:
    """Do as the test before, on ranks that are forked once for several cases."""
    with torch.no_grad():
        found = [small(name) for name, _ in calls]
        expected = [each.stock() for each in found]
    plans = [planned(each, plan) for each, (_, plan) in zip(found, calls, strict=True)]
    results = outputs_of_each([*zip(found, plans, strict=True)], count_gathers)
    errors = {call: worst(outs, stock) for call, outs, stock in zip(calls, results, expected, strict=True)}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("flux", True),
        ("wan, text", True),
        ("krea 2", True),
        ("ltx-2", True),
        pytest.param("ltx-2, weighed guide", False, marks=thorough),
    ],
)
def test_an_exchange_in_fp8_is_near_and_one_with_weighted_tokens_exact(name: str, rounds: bool, case: Any) -> None:
    found, expected = case(name)
    plans = [plan_for(found, exchange="fp8", head_chunks=2, **degrees) for degrees in ({"ulysses": 2}, {"ring": 2})]
    for results in outputs_in_turn(found, plans):
        error = worst(results, expected)
        assert TOLERANCE < error < 0.03 if rounds else error <= TOLERANCE
        assert all(torch.equal(outs[0], results[0][0]) for outs in results)  # all ranks need equal bits


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("flux, references", ("input", "output")),
        ("chroma", ("input", "output")),
        ("qwen-image-edit, negative index", ("input", "input")),
        ("sd 3.5 medium", ("output", "output")),
    ],
)
def test_residuals_of_a_controlnet_need_no_other_rank(name: str, kinds: tuple[str, str], case: Any) -> None:
    """Residuals are added after the first block of a kind and the second of one, on two stages."""
    found, plain = case(name)
    picture = Picture(tuple(found.x.shape), as_patch_size(found.declaration.patch_size(found.model), found.x.ndim - 2))
    heads, head_dim = found.declaration.attention_heads(found.model)
    first, second = (draw(1, picture.tokens, heads * head_dim, seed=seed) for seed in (6, 7))
    control: dict[str, list[Tensor | None]] = {kinds[1]: [None, second]}
    control[kinds[0]] = [first, *control.get(kinds[0], [])[1:]]
    assert set(control) == set(found.declaration.control)
    controlled = replace(found, arguments={**found.arguments, "control": control})
    expected = controlled.stock()
    assert worst([[plain]], expected) > 1e-2
    results = outputs(controlled, plan_for(found, pipefusion=2, ring=2, patches=1), count_gathers)
    assert worst(results, expected) <= TOLERANCE


@pytest.mark.parametrize("place", [("double_block", 0), ("single_block", 1)])
def test_a_block_that_guidance_skips_gives_the_models_own_result(place: tuple[str, int], case: Any) -> None:
    """The skipped block is the first or the last one, where streams begin and end, of two stages with two blocks each."""
    found, plain = case("flux, references")
    found = replace(found, options={"patches_replace": {"dit": {place: lambda arguments, _: arguments}}})
    expected = found.stock()
    assert worst([[plain]], expected) > 1e-2
    results = outputs(found, plan_for(found, pipefusion=2, ring=2, patches=1))
    assert worst(results, expected) <= TOLERANCE


@pytest.mark.parametrize("ranks", [8, pytest.param(5, marks=thorough)])
def test_more_ranks_than_text_tokens_give_the_models_own_result(ranks: int, case: Any) -> None:
    """Ranks without a token of a stream hold one that no query attends to."""
    found, expected = case("flux, references")
    assert worst(outputs(found, plan_for(found, ring=ranks)), expected) <= TOLERANCE


def redeclared(case: Case, **fields: Any) -> Declaration:
    """Return a case's declaration with other fields of its first group."""
    first, *others = case.declaration.groups
    return redeclare(case.declaration, groups=(redeclare(first, **fields), *others))


def without_argument(name: str) -> Change:
    """Return a function that returns a case's declaration without an argument of its first group."""

    def change(case: Case) -> Declaration:
        arguments = case.declaration.groups[0].arguments
        return redeclared(case, arguments={other: kind for other, kind in arguments.items() if other != name})

    return change


def without_attentions(case: Case) -> Declaration:
    """Return the declaration without the attentions of its first group."""
    return redeclared(case, attentions=())


def with_one_attention_more(case: Case) -> Declaration:
    """Return the declaration with the first attention of its only group once more."""
    attentions = case.declaration.groups[0].attentions(case.model.blocks[0])
    return redeclared(case, attentions=(*attentions, attentions[0]))


REFUSED: list[tuple[str, Change, dict[str, Tensor], str]] = [
    ("flux", without_argument("pe"), {}, f"^pe {UNSUPPORTED}"),
    ("qwen-image-edit, zero-timestep references", without_argument(ZERO), {}, f"^{ZERO} {UNSUPPORTED}"),
    ("wan, text", without_argument("freqs"), {}, f"^freqs {UNSUPPORTED}"),
    ("flux", without_attentions, {}, UNCALLED),
    ("qwen-image", without_attentions, {}, UNCALLED),
    ("z-image", without_attentions, {}, UNCALLED),
    ("wan, text", with_one_attention_more, {}, "called attention 2 times and this pack expects 3"),
    (
        "wan, text",
        redeclared,
        {"context": text(batch=3)},
        "^context of the model's .* is for 3 items of a batch of 1, ",
    ),
    # FLUX Redux has such a bias between text and picture.
    ("flux", redeclared, {"attention_mask": torch.zeros(2, 42, 42)}, "^attn_mask of the model's .* is not supported"),
    (
        "qwen-image",
        redeclared,
        {"attention_mask": torch.linspace(-1, 0, 7)[None]},
        "has weights for tokens, or differs",
    ),
]
"""Cases with a changed declaration or argument, and the message with which the forward is refused."""


@pytest.mark.parametrize(("name", "change", "given", "message"), REFUSED)
def test_a_forward_with_undeclared_parts_or_unsupported_inputs_is_refused(
    name: str, change: Change, given: dict[str, Tensor], message: str, case: Any
) -> None:
    found, _ = case(name)
    rank = run_alone(found, change(found))
    with pytest.raises(Refused, match=message):
        rank.run(**given)


@pytest.mark.parametrize(("name", "kv_heads"), [("krea 2", 3), pytest.param("omnigen 2", 2, marks=thorough)])
def test_heads_of_keys_shared_otherwise_than_declared_are_refused(name: str, kv_heads: int, case: Any) -> None:
    """The check compares the keys that the model repeats before its call, and their number."""
    found, _ = case(name)
    (attention,) = found.declaration.groups[0].attentions(blocks_of(found.model, found.declaration)[0].module)
    assert attention.kv_heads not in (0, kv_heads)
    other = redeclared(found, attentions=(redeclare(attention, kv_heads=kv_heads),))
    rank = ProofRank(found, plan_for(found, patches=2), other)
    with pytest.raises(Refused, match=f"and this pack expects {kv_heads} of keys and values, or repetitions of them"):
        rank.run()


def test_a_model_without_the_blocks_or_arguments_is_refused_when_it_is_built(case: Any) -> None:
    found, _ = case("flux")
    with pytest.raises(Refused, match="has no triple_blocks"):
        run_alone(found, redeclared(found, path="triple_blocks"))
    arguments = found.declaration.groups[0].arguments
    with pytest.raises(Refused, match="has no argument tone"):
        run_alone(found, redeclared(found, arguments={**arguments, "tone": arguments["vec"]}))


def test_vectors_for_each_frame_are_refused_where_one_set_is_declared(case: Any) -> None:
    """The model is declared for one timestep, with six vectors. Taking each frame's vectors for all tokens' is 2.1 % off."""
    once, expected = case("wan, text")
    arguments = once.declaration.groups[0].arguments
    declaration = redeclared(once, arguments={**arguments, "e": Replicated(vectors=(6,))})
    with torch.no_grad():
        (results,) = run_ranks(1, lambda _: [ProofRank(once, plan_for(once), declaration).run()])
    assert worst([results], expected) <= TOLERANCE
    framed, _ = case("wan 2.2, a timestep a frame")
    with pytest.raises(
        Refused,
        match=r"^e of the model's WanAttentionBlock has the shape \[1, 3, 6, 96\], and only 6 vectors for each of a "
        "batch of 1 are supported with a parallel MODEL: ",
    ):
        run_alone(framed, declaration).run()


@pytest.mark.parametrize(
    ("name", "batch", "latent", "tokens"),
    [
        ("wan, text", 3, (3, 7, 10), 60),
        ("wan, text", 4, (3, 7, 10), 3),
        ("wan, text", 5, (6, 7, 10), 6),
        ("flux", 8, (16, 24), 96),
    ],
    ids=str,
)
def test_dimensions_of_equal_length_are_not_mixed_up(
    name: str, batch: int, latent: tuple[int, ...], tokens: int, case: Any
) -> None:
    """Batches have as many items as frames, rows or columns. Text has as many tokens as the picture, its frames or its
    features.
    """
    found, _ = case(name)
    given = {
        key: draw(batch, tokens, tensor.shape[2], seed=5)
        if key == "context"
        else tensor[:1].expand(batch, *tensor.shape[1:])
        for key, tensor in found.arguments.items()
        if tensor is not None
    }
    x = draw(batch, found.x.shape[1], *latent, seed=6)
    other = replace(found, x=x, timestep=found.timestep[:1].expand(batch), arguments=given)
    with torch.no_grad():
        expected = other.stock()
    assert worst(outputs(other, plan_for(other, ulysses=2)), expected) <= TOLERANCE


def run_alone(case: Case, declaration: Declaration | None = None) -> ProofRank:
    """Return one rank in this process, with another declaration if one is given."""
    return ProofRank(case, plan_for(case), declaration)
