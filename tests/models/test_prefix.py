"""A model whose text and references attend only to themselves, split over ranks that all keep them, as Qwen-Image 2.1 is.

The model is a stand-in of the shape that the declaration names, for a ComfyUI that has no such class yet. The stand-in keeps
its prefix's keys and values for a run, if `transformer_options` say so: its first forward fills the cache, and later forwards
read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.reduced import randomise
from parallel_backend.models.comfyui.small.case import Case
from parallel_backend.models.declared.qwen_image21 import QWEN_IMAGE21
from parallel_backend.models.sequence_parallel.compiled import OVERRIDE
from parallel_backend.plan import ResolvedPlan
from tests.models.parallel_models import outputs as outputs_of
from tests.models.parallel_models import share_weights, worst
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.tiny.models import draw

# isort: split
from comfy.ldm.modules.attention import optimized_attention

HEADS, WIDE, TEXT, CHANNELS, DEPTH = 3, 16, 24, 8, 3
WIDTH = HEADS * WIDE
TOLERANCE = 1e-6

UNEQUAL = {"ring": 2, "ulysses": 2, "shares": (100, 61, 45, 20)}
FEW = (1, 2)
"""The size of a latent with fewer tokens than three ranks."""


class Turned(nn.Module):
    """The attention of a block, computed by a function that the model passes in."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, pe: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.to_qkv(x).view(*x.shape[:2], 3, HEADS, WIDE).unbind(2)
        return self.out(attend(turned(q, pe), turned(k, pe), v, HEADS))


def turned(x: Tensor, pe: Tensor) -> Tensor:
    """Return x `[batch, tokens, heads, width]` with pairs of channels turned by pe `[1, tokens, 1, width / 2, 2, 2]`."""
    return (pe @ x.unflatten(-1, (-1, 2, 1))).flatten(-3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn = Turned()
        self.inside = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(
        self,
        x: Tensor,
        mod: Any,
        pe: Tensor,
        attn_fn: Callable[..., Tensor],
        prefix_len: int,
        transformer_options: Mapping[str, Any] = {},
    ) -> Tensor:
        """Change x in place. The prefix is modulated as at the time zero, and the picture by its own time."""
        (scale, gate), (still_scale, still_gate) = mod

        def modulated(x: Tensor) -> Tensor:
            out = self.norm(x) * (1 + scale)
            out[:, :prefix_len] = self.norm(x[:, :prefix_len]) * (1 + still_scale)
            return out

        for part in (lambda x: self.attn(x, pe, attn_fn), self.inside):
            y = part(modulated(x))
            x[:, prefix_len:] += y[:, prefix_len:] * gate
            x[:, :prefix_len] += y[:, :prefix_len] * still_gate
        return x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        return self.norm(x) * (1 + self.scale(temb)[:, None])


class Model(nn.Module):
    """Text, each reference in its slot, and the picture last; each part attends to itself and to the parts before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_dim = WIDTH
        self.txt_in, self.img_in = nn.Linear(TEXT, WIDTH), nn.Linear(CHANNELS, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.transformer_blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm_out, self.proj_out = Head(), nn.Linear(WIDTH, CHANNELS)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.forgets = 0
        """Number of prefix tokens that every block after the first treats as the picture's."""

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        ref_latents: Sequence[Tensor] = (),
        image_slots: Sequence[int] = (),
        transformer_options: Mapping[str, Any] = {},
    ) -> Tensor:
        stream, segments = self._sequence(x, context, ref_latents, image_slots)
        pe = _matrices(stream.shape[1])
        prefix_len = stream.shape[1] - x.shape[-1] * x.shape[-2]
        now, still = (self.time(time.view(-1, 1)) for time in (timestep, timestep.new_zeros(1)))
        mod = tuple(tuple(part[:, None] for part in self.modulation(time).chunk(2, dim=-1)) for time in (now, still))

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            operands = (part.flatten(2) for part in (q, k, v))
            return optimized_attention(*operands, HEADS, mask=mask, transformer_options=transformer_options)

        def in_order(parts: Sequence[Any], keep: int | None) -> Callable[..., Tensor]:
            def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
                if keep is not None:
                    self.kept[keep] = k[:, :prefix_len].clone(), v[:, :prefix_len].clone()
                outs = [attend(q[:, start:stop], k[:, :stop], v[:, :stop], mask) for start, stop, mask in parts]
                return torch.cat(outs, dim=1)

            return attention

        def after(kept: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
            def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
                return attend(q, *(torch.cat(pair, dim=1) for pair in zip(kept, (k, v), strict=True)))

            return attention

        hit, keeps = bool(self.kept), bool(transformer_options.get("keeps"))
        prefix, target = stream[:, :prefix_len], stream[:, prefix_len:]
        for number, block in enumerate(self.transformer_blocks):
            if not keeps:
                first_tokens = prefix_len - (self.forgets if number else 0)
                stream = block(stream, mod, pe, in_order(segments, None), first_tokens, transformer_options)
                continue
            if not hit:
                first = in_order(segments[:-1], number)
                prefix = block(prefix, mod, pe[:, :prefix_len], first, prefix_len, transformer_options)
            attention = after(self.kept[number])
            target = block(target, mod, pe[:, prefix_len:], attention, 0, transformer_options)
        if not keeps:
            target = stream[:, prefix_len:]
        out = self.proj_out(self.norm_out(target, now))
        return out.transpose(1, 2).reshape(x.shape)

    def _sequence(
        self, x: Tensor, context: Tensor, references: Sequence[Tensor], slots: Sequence[int]
    ) -> tuple[Tensor, list[tuple[int, int, Tensor | None]]]:
        """Return the stream, and for each part its start, its stop and the mask of a text."""
        text, parts, segments, length = self.txt_in(context), [], [], 0
        ends = [*slots, text.shape[1]]
        for start, stop, latent in zip([0, *ends], ends, [*references, x], strict=False):
            count = stop - start
            if count:
                parts.append(text[:, start:stop])
                mask = torch.ones(count, length + count, dtype=torch.bool).tril(length)
                segments.append((length, length + count, mask))
                length += count
            parts.append(self.img_in(latent.flatten(2).transpose(1, 2)))
            segments.append((length, length + parts[-1].shape[1], None))
            length += parts[-1].shape[1]
        return torch.cat(parts, dim=1), segments


def _matrices(tokens: int) -> Tensor:
    """Return matrices `[1, tokens, 1, width / 2, 2, 2]` that turn by a token's position."""
    angles = torch.arange(tokens)[:, None] / 10 ** torch.linspace(0, 2, WIDE // 2)
    rows = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=-1)
    return rows.view(1, tokens, 1, WIDE // 2, 2, 2)


def case_of(references: bool = True, size: tuple[int, int] = (5, 7), keeps: bool = True) -> Case:
    """Return a call of the stand-in for a batch of two."""
    arguments: dict[str, Any] = {"context": draw(2, 6, TEXT, seed=2)}
    if references:
        latents = [draw(2, CHANNELS, *size, seed=seed) for seed, size in ((3, (3, 4)), (4, (4, 2)))]
        arguments |= {"ref_latents": latents, "image_slots": [2, 6]}
    latent, time = draw(2, CHANNELS, *size, seed=1), torch.tensor([0.6, 0.6])
    model = randomise(Model(), seed=5)
    return Case(model, QWEN_IMAGE21, latent, time, arguments, "QwenImage21", options={"keeps": keeps})


def nothing(rank: ProofRank) -> None:
    """Leave a rank as it is."""


def outputs(case: Case, plan: ResolvedPlan, prepare: Callable[[ProofRank], object] = nothing) -> Any:
    """Return each rank's results of two calls, of which the second has another latent and finds a cache filled."""

    def on_rank(_: int) -> list[Tensor]:
        rank = ProofRank(case, plan)
        prepare(rank)
        first = rank.run()
        gathers = rank.forward.gathers
        rank.case = replace(case, x=case.x.flip(2))
        second = rank.run()
        assert gathers == rank.forward.gathers == 1
        assert len(rank.model.entered.kept) == (DEPTH if case.options["keeps"] else 0)
        return [out for out in (first, second) if out is not None]

    return run_ranks(plan.world_size, on_rank)


@torch.no_grad()
def expected_of(case: Case) -> list[Tensor]:
    """Return the outputs of the stand-in's own forward for both calls, without a cache."""
    plain = replace(case, options={**case.options, "keeps": False})
    return [each.stock() for each in (plain, replace(plain, x=case.x.flip(2)))]


def assert_equal(results: list[list[Tensor]], expected: list[Tensor]) -> None:
    for call, stock in enumerate(expected):
        assert worst([[outs[call]] for outs in results], stock) <= TOLERANCE, f"call {call}"


@pytest.mark.parametrize(
    ("given", "degrees", "prepare"),
    [
        pytest.param({"keeps": False}, {"ulysses": 2, "head_chunks": 2}, nothing, id="ulysses 2, in chunks"),
        pytest.param({"size": FEW, "references": False}, {"ring": 3}, nothing, id="ring 3, a rank without a token"),
        pytest.param({}, {"ring": 3}, share_weights, id="ring 3, sharded"),  # a block runs twice in a step
        *(
            pytest.param(given, degrees, prepare, marks=thorough)
            for given, degrees, prepare in (
                ({"references": False}, {"ulysses": 2}, nothing),
                ({"references": False}, UNEQUAL, nothing),
                ({"keeps": False}, UNEQUAL, nothing),
                ({"keeps": False, "size": FEW}, {"ulysses": 3}, nothing),
                ({}, {"ring": 3}, functools.partial(share_weights, streamed=True)),
            )
        ),
    ],
)
def test_a_split_gives_the_models_own_result(given: Any, degrees: Any, prepare: Callable[[ProofRank], object]) -> None:
    """The cache of the prefix is filled in one call and hit in the next, unless there is none."""
    case = case_of(**given)
    assert_equal(outputs(case, plan_for(case, **degrees), prepare), expected_of(case))


@pytest.mark.parametrize(
    ("references", "degrees"),
    [
        (True, {"pipefusion": 2, "ring": 2, "shares": (100, 35)}),
        pytest.param(False, {"pipefusion": 3}, marks=thorough),
        pytest.param(True, {"pipefusion": 2, "ulysses": 2, "patches": 3}, marks=thorough),
        pytest.param(True, {"patches": 2}, marks=thorough),
    ],
    ids=str,
)
def test_a_patch_gives_the_models_own_result(references: bool, degrees: Any) -> None:
    """A patch is computed from a cache of the same call, so that no key is of an earlier step."""
    case = case_of(references, keeps=False)
    results = outputs_of(case, plan_for(case, **degrees))
    with torch.no_grad():
        assert_equal([outs for outs in results if outs], [case.stock()] * 2)


@pytest.mark.parametrize("keeps", [False, True], ids=["cache off", "filled, then hit"])
def test_one_rank_gives_the_same_bits(keeps: bool) -> None:
    case = case_of(keeps=keeps)
    (outs,) = outputs(case, plan_for(case))
    with torch.no_grad():
        stock = [each.stock() for each in (case, replace(case, x=case.x.flip(2)))]
    assert all(torch.equal(*pair) for pair in zip(outs, stock, strict=True))
    case.model.kept.clear()


def test_only_the_pictures_tokens_are_exchanged() -> None:
    """Exchanges hold no text and no references: as many bytes travel with references as without."""

    def sent(references: bool) -> int:
        case = case_of(references, keeps=False)

        def on_rank(_: int) -> int:
            rank = ProofRank(case, plan_for(case, ulysses=2))
            rank.run()
            return sum(rank.meter.sent.values())

        return int(run_ranks(2, on_rank)[0])

    assert sent(references=True) == sent(references=False) > 0


def by_position(_: slice, __: int) -> Callable[..., Tensor]:
    """Return a function in attention's place that weighs values by their positions."""

    def override(kernel: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, **told: Any) -> Tensor:
        along = 2 if told.get("skip_reshape") else 1
        weights = 1 + torch.arange(v.shape[along]).view(-1, *[1] * (v.ndim - 1 - along)) / 8
        return kernel(q, k, v * weights, heads, **told)

    return override


@pytest.mark.parametrize(
    ("ranks", "keeps"), [(2, True), pytest.param(2, False, marks=thorough), pytest.param(1, True, marks=thorough)]
)
def test_a_function_in_attentions_place_gives_the_models_own_result(ranks: int, keeps: bool) -> None:
    """The function is given all tokens in the model's order, the prefix included."""
    case = case_of(keeps=keeps)
    with torch.no_grad():
        plain = replace(case, options={"keeps": False, OVERRIDE: by_position(slice(None), HEADS)}).stock()

    def override(rank: ProofRank) -> None:
        rank.forward.override = by_position

    assert worst(outputs_of(case, plan_for(case, ulysses=ranks), override), plain) <= TOLERANCE


def other_queries(model: Model) -> None:
    """Make the second block attend with one query less."""

    class Other(Block):
        def forward(
            self, x: Tensor, mod: Any, pe: Tensor, attn_fn: Any, prefix_len: int, transformer_options: Any = None
        ) -> Tensor:
            def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
                return attn_fn(q[:, :-1], k, v, heads)

            return super().forward(x, mod, pe, attend, prefix_len, transformer_options)

    model.transformer_blocks[1].__class__ = Other


def other_prefix(model: Model) -> None:
    """Make all blocks but the first take the prefix for one token shorter."""
    model.forgets = 1


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        (other_queries, "the model's Other attends with "),
        (other_prefix, "the model's block transformer_blocks.1 was given a prefix of 5 tokens and expects 6"),
    ],
)
def test_a_model_with_other_queries_or_another_prefix_is_refused(change: Callable[[Model], None], begins: str) -> None:
    case = case_of(references=False, keeps=False)
    change(case.model)

    def on_rank(_: int) -> str:
        with pytest.raises(Refused) as refused:
            ProofRank(case, plan_for(case, ulysses=2)).run()
        return str(refused.value)

    for message in run_ranks(2, on_rank):
        assert message.startswith(begins)
