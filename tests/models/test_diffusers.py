"""diffusers' own CogVideoX and PixArt under each split, against the same models in one process."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXPipeline
from msgspec.structs import replace as redeclare
from torch import Tensor
from torch._dynamo.utils import counters

from parallel_backend.comm.meter import Meter
from parallel_backend.declaration import Replicated, ReplicatedKeys
from parallel_backend.distance import error_of
from parallel_backend.errors import Refused
from parallel_backend.mesh import build_mesh
from parallel_backend.models.families import FAMILIES
from parallel_backend.models.family import Execution
from parallel_backend.models.inputs import Inputs
from parallel_backend.plan import ResolvedPlan
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.layers.packing import shape_parameters
from parallel_backend.weights.loading.loader import WeightSource, load_weights
from parallel_backend.weights.stores.replicated import ReplicatedStore
from parallel_backend.weights.stores.store import BlockAccess
from parallel_backend.worker.memory.stage_part import stages
from tests.support.plans import cpu_plan
from tests.support.rank_parts import CPU, neighbours, watch
from tests.support.ranks import run_in_turn, run_ranks
from tests.support.selection import thorough
from tests.support.tiny.cogvideox import cogvideox, save_cogvideox
from tests.support.tiny.models import draw
from tests.support.tiny.pixart import TEXT_WIDTH, pixart, save_pixart

TOLERANCE = 1e-5

PLANS = [cpu_plan(), cpu_plan(ring=2, ulysses=2), cpu_plan(pipefusion=3, patches=2), cpu_plan(ulysses=5)]


@dataclass(frozen=True)
class Case:
    """A model's file, one call of the model, and the output of diffusers' own forward."""

    family: str
    path: Path
    x: Tensor
    conditioning: dict[str, Tensor]
    expected: Tensor
    timestep: Tensor = field(default_factory=lambda: torch.tensor([700.0, 300.0]))


def picture(height: int, width: int) -> Callable[[Path], Case]:
    """Return a function that makes a PixArt case: two pictures of `height` x `width` tokens, with texts of two lengths."""

    @torch.no_grad()
    def make(folder: Path) -> Case:
        x, text = draw(2, 4, 2 * height, 2 * width, seed=1), draw(2, 6, TEXT_WIDTH, seed=2)
        mask = (torch.arange(6) < torch.tensor([[4], [6]])).float()
        sizes, ratio = torch.tensor([[112.0, 80.0]] * 2), torch.tensor([[1.4]] * 2)
        case = Case("pixart", save_pixart(folder / "pixart.safetensors"), x, {}, x)
        expected = pixart()(
            x,
            text,
            case.timestep,
            added_cond_kwargs={"resolution": sizes, "aspect_ratio": ratio},
            encoder_attention_mask=mask,
            return_dict=False,
        )[0][:, :4]
        given = {"context": text, "attention_mask": mask, "c_size": sizes, "c_ar": ratio}
        return replace(case, conditioning=given, expected=expected)

    return make


def video(kind: str, frames: int, height: int, width: int) -> Callable[[Path], Case]:
    """Return a function that makes a CogVideoX case of `frames` frames of tokens, each `height` x `width`."""

    @torch.no_grad()
    def make(folder: Path) -> Case:
        model = cogvideox(kind, max_text_seq_length=7)
        p_t = model.config.patch_size_t or 1
        channels = model.config.in_channels
        x, text = draw(2, channels, frames * p_t, 2 * height, 2 * width, seed=1), draw(2, 7, TEXT_WIDTH, seed=2)
        given = {"context": text} | ({"concat": x[:, 16:]} if channels > 16 else {})
        pipeline = CogVideoXPipeline(None, None, None, model, None)
        rope = None
        if model.config.use_rotary_positional_embeddings:
            rope = pipeline._prepare_rotary_positional_embeddings(16 * height, 16 * width, frames * p_t, CPU)
        if model.ofs_embedding is not None:
            given["ofs"] = torch.full((2,), 2.0)
        case = Case("cogvideox", save_cogvideox(folder / "video.safetensors", kind), x[:, :16], given, x)
        (out,) = model(
            x.transpose(1, 2), text, case.timestep, ofs=given.get("ofs"), image_rotary_emb=rope, return_dict=False
        )
        return replace(case, expected=out.transpose(1, 2))

    return make


CASES: dict[str, Callable[[Path], Case]] = {
    "pixart": picture(7, 5),
    "2b": video("2b-odd", 3, 5, 3),
    "5b": video("5b", 5, 3, 4),
    "1.5, image": video("1.5-i2v", 3, 3, 5),
}
SIZED = {"pixart, smaller": picture(3, 4), "5b, higher": video("5b", 3, 5, 2)}
"""Cases with the same models at another size."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Return a function that makes each case once."""
    return functools.cache(lambda name: (CASES | SIZED)[name](tmp_path_factory.mktemp(name)))


class Rank:
    """One rank's part of a case."""

    def __init__(
        self, number: int, case: Case, plan: ResolvedPlan, dtype: torch.dtype = torch.float32, compiler: str = ""
    ) -> None:
        self.case = case
        self._plan = plan
        self._mesh = build_mesh(plan, CPU, Meter())
        self.model = load(case, plan, number, dtype)
        self.forward: Any = self.model.forward_on(Execution(self._mesh, plan, BlockAccess(), lambda: None, compiler))

    @torch.inference_mode()
    def run(self, patch: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """Return the output of the whole latent, or of one patch, on the last stage."""
        case = self.case
        given = {name: tensor.to(dtype) for name, tensor in case.conditioning.items()}
        inputs = Inputs("key", case.x.shape, dtype, CPU, case.timestep, given)
        out: Tensor | None = self.forward(inputs, case.x.to(dtype) if self._mesh.is_first_stage else None, patch)
        self._mesh.finish_sending()
        return out

    def whole_and_by_patch(self) -> list[Tensor]:
        """Return the output of the whole latent and, if there are patches, the joined outputs of all patches; on the last
        stage, whose ranks gather a stream once.
        """
        outs = [self.run()]
        assert self.forward.gathers == (outs[0] is not None)
        count = self._plan.patches
        if count > 1:
            parts = [self.run(patch) for patch in range(count)]
            (region, *_) = self.model.patches(self.case.x.shape, count)
            if outs[0] is not None:
                outs.append(torch.cat([part for part in parts if part is not None], dim=region.dim))
        return [out for out in outs if out is not None]


def load(case: Case, plan: ResolvedPlan, rank: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return a stage with its weights."""
    family = FAMILIES[case.family]
    part, config = family.inspect(read_header(case.path))
    model = family.build(config, stages(plan)[rank])
    computed = {name: buffer for name, buffer in model.module.named_buffers() if not buffer.is_meta}
    shape_parameters(model.module, part, family.keys(config), dtype)
    model.module.to_empty(device="cpu")
    for name, buffer in computed.items():
        model.module.get_buffer(name).copy_(buffer)
    source = WeightSource(part, family.keys(config), dtype)
    load_weights(model.module, ReplicatedStore(model.module), source, neighbours(), watch())
    return model


QUICK = ("pixart", "1.5, image")
"""Cases of the quick run, without and with frames. engine/test_cogvideox has the other types under several plans."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[thorough] * (name not in QUICK)) for name in CASES])
def test_every_split_gives_diffusers_own_result(name: str, case: Any) -> None:
    """Each plan's whole call equals diffusers' result, and so does each patch with a cache of the same call."""
    found = case(name)

    def split(plan: ResolvedPlan) -> tuple[int, Callable[[int], list[Tensor]]]:
        def on_rank(number: int) -> list[Tensor]:
            return Rank(number, found, plan).whole_and_by_patch()

        return plan.world_size, on_rank

    for plan, results in zip(PLANS, run_in_turn([split(plan) for plan in PLANS]), strict=True):
        assert any(results)
        assert max(error_of(out, found.expected) for outs in results for out in outs) <= TOLERANCE, plan.describe()


@thorough  # models/test_compiled has blocks of ComfyUI's classes, by the same CompiledBlocks
@pytest.mark.parametrize(
    ("names", "degrees", "graphs"),
    [
        pytest.param(["pixart", "pixart, smaller"], {"ulysses": 2}, 1, id="pixart"),
        pytest.param(["5b", "5b, higher"], {}, 1, id="5b"),
        pytest.param(["2b"], {"pipefusion": 3, "patches": 2}, 2, id="2b"),
        pytest.param(["1.5, image"], {"ring": 2, "ulysses": 2}, 1, id="1.5, image"),
    ],
)
def test_compiled_blocks_give_diffusers_own_result(
    names: list[str], degrees: dict[str, int], graphs: int, case: Any
) -> None:
    """One graph serves all sizes. Patches without text need one more, with one token in the place of the text."""
    cases, plan = [case(name) for name in names], cpu_plan(**degrees)

    def on_rank(number: int) -> list[float]:
        counters.clear()
        rank = Rank(number, cases[0], plan, compiler="aot_eager")
        errors = []
        for rank.case in cases:
            errors += [error_of(out, rank.case.expected) for out in rank.whole_and_by_patch()]
        assert rank.forward.uncompiled() == ()
        assert counters["stats"]["unique_graphs"] == graphs
        return errors

    ranks = run_ranks(plan.world_size, on_rank, 300)
    assert len(ranks[-1]) == len(cases) * (1 + (plan.patches > 1))
    assert max(max(errors, default=0.0) for errors in ranks) <= TOLERANCE


@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["pixart", "2b"])
def test_weights_are_cast_to_the_compute_dtype(name: str, weights: torch.dtype, case: Any) -> None:
    """Norms, convolutions and tables are cast too. bf16 changes the result a little, and fp8 weights change it far more."""
    found = case(name)
    out = Rank(0, found, cpu_plan(), weights).run(dtype=torch.bfloat16)
    assert out is not None and out.dtype == torch.bfloat16
    assert error_of(out, found.expected) <= (0.5 if weights.itemsize == 1 else 0.05)


@pytest.mark.parametrize(("name", "argument"), [("pixart", "timestep"), ("5b", "image_rotary_emb")])
def test_an_undeclared_argument_or_attention_is_refused(
    name: str, argument: str, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test removes an argument and an attention from the declaration, and adds one of each."""
    found = case(name)
    family: Any = FAMILIES[found.family]
    (group,) = family.declaration.groups
    left = {key: value for key, value in group.arguments.items() if key != argument}
    for changed, reason in (
        (redeclare(group, arguments=left), argument),
        (redeclare(group, attentions=group.attentions[:-1]), "attention more than"),
        (redeclare(group, attentions=(*group.attentions, ReplicatedKeys())), "called attention"),
        (redeclare(group, arguments={**group.arguments, "new": Replicated()}), "has no argument new"),
    ):
        monkeypatch.setattr(family, "declaration", redeclare(family.declaration, groups=(changed,)))
        with pytest.raises(Refused, match=re.escape(reason)):
            Rank(0, found, cpu_plan()).run()


def test_other_weights_of_diffusers_are_refused(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family: Any = FAMILIES["pixart"]
    _, config = family.inspect(read_header(case("pixart").path))
    known = dict(family.keys(config))
    known.pop("proj_out.bias")
    monkeypatch.setattr(family, "keys", lambda _: known)
    with pytest.raises(
        Refused,
        match=r"diffusers .* has a PixArtTransformer2DModel with other weights than this pack supports .*proj_out.bias",
    ):
        family.build(config, stages(cpu_plan())[0])
