"""Quantised layers give the bits of ComfyUI's own on the same file, on devices with and without fp8 multiplication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel_backend.errors import Refused
from parallel_backend.models.comfyui import quantised_layers
from parallel_backend.models.comfyui.fast_fp8 import FastLinear, multiply_in_fp8
from parallel_backend.models.comfyui.quantisation import open_checkpoint
from parallel_backend.models.comfyui.quantised_layers import quantise_layers
from parallel_backend.weights.adapters.lora import NONE, AdapterSet
from parallel_backend.weights.files.checkpoint import Checkpoint, read_header
from parallel_backend.weights.files.keymap import Piece
from parallel_backend.weights.formats import PLAIN
from parallel_backend.weights.layers.cast import pack
from parallel_backend.weights.layers.packing import resident_bytes, shape_parameters
from parallel_backend.weights.layers.quantised import compute_in
from parallel_backend.weights.loading.loader import WeightSource, load_weights
from parallel_backend.weights.stores.replicated import ReplicatedStore
from parallel_backend.weights.stores.sharded import Sharded
from parallel_backend.weights.stores.store import WeightStore
from tests.support.rank_parts import CPU, LORA, everyone, neighbours, patching, watch
from tests.support.ranks import run_ranks
from tests.support.tiny.models import draw
from tests.support.tiny.quantised import FORMATS, save_quantised

# isort: split
import comfy.model_management
import comfy.ops
from comfy.model_patcher import ModelPatcher
from comfy.weight_adapter import LoRAAdapter

S = TypeVar("S", bound=WeightStore)

LAYER, NAME = "blocks.0", "blocks.0.weight"
ROWS, COLUMNS = 48, 192
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
INPUT_SCALED = ("fp8", "fp8_e5m2", "nvfp4", "mxfp8")


KEYS = {NAME: Piece(NAME, 0, ROWS, (COLUMNS,))}


class Described:
    """A stand-in for ComfyUI's description of a quantised file."""

    quant_config: ClassVar = {"mixed_ops": True}


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a file of one layer in a format."""
    tensors = {NAME: draw(ROWS, COLUMNS, seed=1) / COLUMNS**0.5, f"{LAYER}.bias": draw(ROWS, seed=2)}

    def write(form: str) -> Path:
        return save_quantised(tmp_path / "x.safetensors", tensors, form, 0.5 if form in INPUT_SCALED else None)

    return write


@pytest.fixture(params=[False, True], ids=["emulated", "native"])
def _native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test on a device that multiplies in fp8, and on one that does not."""
    monkeypatch.setattr(comfy.model_management, "SUPPORT_FP8_OPS", request.param)
    with torch.inference_mode():
        yield


def build(path: Path) -> tuple[nn.Module, Checkpoint]:
    """Return a model of one layer, built from the file's header, and the checkpoint to load it from."""
    opened = open_checkpoint(read_header(path))
    part, marks = opened.under(opened.tensors)
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(COLUMNS, ROWS, device="meta")])
    made_of = quantise_layers(model, part, marks, Described())
    entries = {key: entry for key, entry in part.entries.items() if key == f"{LAYER}.bias"} | made_of
    return model, replace(part, entries=entries)


def load(path: Path, compute: torch.dtype = torch.float32) -> Any:
    """Return the layer as a rank loads it."""
    return load_with(path, ReplicatedStore, compute)[0].get_submodule(LAYER)


def load_with(
    path: Path, store_of: Callable[[nn.Module], S], compute: torch.dtype = torch.float32
) -> tuple[nn.Module, S]:
    """Return the model as a rank loads it, and the store of its weights."""
    model, part = build(path)
    keys = {key: Piece(key, 0, entry.shape[0], ()) for key, entry in part.entries.items()}
    compute_in(model, compute)
    shape_parameters(model, part, keys, compute)
    assert resident_bytes(part, compute) == sum(parameter.nbytes for parameter in model.parameters())
    store = store_of(model)
    store.materialise(CPU)
    load_weights(model, store, WeightSource(part, keys, compute), neighbours(), watch())
    return model, store


def stock(path: Path, compute: torch.dtype = torch.float32) -> Any:
    """Return the same layer from ComfyUI's loader."""
    tensors = {name.removeprefix(f"{LAYER}."): tensor for name, tensor in load_file(path).items()}
    operations = comfy.ops.pick_operations(None, compute, model_config=Described())
    layer = operations.Linear(COLUMNS, ROWS, device="cpu")
    layer.load_state_dict(tensors)
    return layer


def lora_of(size: float = 1.0) -> AdapterSet:
    """Return a LoRA on the layer, with matrices of this size."""
    return AdapterSet({NAME: [LORA]}, {"u": size * draw(ROWS, 4, seed=4), "d": size * draw(4, COLUMNS, seed=5)})


@pytest.mark.usefixtures("_native")
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_quantised_layer_gives_comfyuis_bits(
    file: Callable[[str], Path], form: str, compute: torch.dtype, device: str
) -> None:
    ours, theirs = load(file(form), compute).to(device), stock(file(form), compute).to(device)
    x = draw(2, 37, COLUMNS, seed=3).to(device, compute)
    assert torch.equal(ours(x), theirs(x))
    assert ours.weight.dtype == compute


@pytest.mark.parametrize("adds_in", [torch.float32, torch.float16], ids=["as on the CPU", "as on a GPU"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_lora_on_a_quantised_layer_gives_comfyuis_bits_and_leaves_no_trace(
    file: Callable[[str], Path], form: str, monkeypatch: pytest.MonkeyPatch, adds_in: torch.dtype
) -> None:
    """The LoRA is applied as ComfyUI's ModelPatcher does, and removed without a trace."""
    monkeypatch.setitem(comfy.model_management.LORA_COMPUTE_DTYPES, CPU, adds_in)
    path = file(form)
    ours, model = load(path), nn.Module()
    model.diffusion_model = nn.Module()
    model.diffusion_model.blocks = nn.ModuleList([stock(path)])
    adapters = lora_of(size=0.2)
    patcher = ModelPatcher(model, CPU, CPU)
    matrices = adapters.tensors["u"], adapters.tensors["d"]
    patcher.add_patches({f"diffusion_model.{NAME}": LoRAAdapter(set(), (*matrices, 4.0, None, None, None))}, 0.7)
    patcher.patch_weight_to_device(f"diffusion_model.{NAME}", device_to=CPU)
    whole = nn.Module()
    whole.blocks = nn.ModuleList([ours])
    before = {name: parameter.clone() for name, parameter in whole.named_parameters()}
    merging = patching(whole, ReplicatedStore(whole), KEYS, _never_again)
    merging.merge(adapters)
    expected = model.diffusion_model.blocks[0].state_dict()
    changed = {name: parameter for name, parameter in ours.parts.named_parameters() if name in expected}
    assert not torch.equal(changed["weight"].view(torch.uint8), before[f"{LAYER}.parts.weight"].view(torch.uint8))
    for name, tensor in changed.items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)), name
    merging.merge(NONE)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), name


def _never_again(names: Collection[str]) -> None:
    pytest.fail(f"{names} are read again")


@pytest.mark.parametrize("form", ["nvfp4", "int8_convrot"])
def test_a_sharded_quantised_layer_gives_the_bits_of_one_rank(file: Callable[[str], Path], form: str) -> None:
    """A block that is gathered for its forward gives the bits of one rank: as loaded, with a LoRA, and after its removal."""
    path, x = file(form), draw(2, 5, COLUMNS, seed=3)

    def outputs(
        store_of: Callable[[nn.Module], Any], use: Callable[[Any], AbstractContextManager[None]]
    ) -> list[Tensor]:
        found = []
        with torch.inference_mode():
            model, store = load_with(path, store_of)
            merging = patching(model, store, KEYS)
            for wanted in (NONE, lora_of(), NONE):
                merging.merge(wanted)
                with use(store):
                    found.append(model.get_submodule(LAYER)(x))
        return found

    @contextmanager
    def first_block(store: Sharded) -> Iterator[None]:
        with store.forward(), store.block(0):
            yield

    def rank(_: int) -> list[Tensor]:
        def sharded(model: nn.Module) -> Sharded:
            blocks = list(model.get_submodule("blocks").children())
            return Sharded(model, blocks, everyone("weights"))

        return [out.clone() for out in outputs(sharded, first_block)]

    expected = outputs(ReplicatedStore, lambda _: nullcontext())
    assert not torch.equal(expected[0], expected[1])
    for found in run_ranks(2, rank):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.usefixtures("_native")
@pytest.mark.parametrize("device", DEVICES)
def test_plain_fp8_multiplied_in_fp8_gives_comfyuis_bits(device: str) -> None:
    weight, bias = (draw(48, 64, seed=1) / 8).to(device, torch.float8_e4m3fn), draw(48, seed=2).to(device)
    layer = nn.Linear(64, 48, device="meta")
    pack(layer, PLAIN[torch.float8_e4m3fn], scaled=False)
    layer.weight = nn.Parameter(weight.view(torch.uint8), requires_grad=False)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    model = nn.Sequential(layer)
    multiply_in_fp8(model, torch.device(device))
    native = comfy.model_management.supports_fp8_compute(torch.device(device))
    assert isinstance(model[0], FastLinear) == native
    operations = comfy.ops.pick_operations(torch.float8_e4m3fn, torch.float32, fp8_optimizations=True)
    theirs = operations.Linear(64, 48, dtype=torch.float8_e4m3fn, device="cpu")
    theirs.weight, theirs.bias = (nn.Parameter(tensor, requires_grad=False) for tensor in (weight, bias))
    x = draw(2, 7, 64, seed=3).to(device)
    assert torch.equal(model(x.clone()), theirs(x.clone()))
    exact = nn.functional.linear(x, weight.float(), bias)
    assert torch.equal(model(x.clone()), exact) != native


def refusal(path: Path, **changed: Tensor) -> str:
    save_file(load_file(path) | {f"{LAYER}.{name}": tensor for name, tensor in changed.items()}, path)
    with pytest.raises(Refused) as refused:
        build(path)
    return str(refused.value)


def test_quantised_tensors_with_wrong_shapes_or_marks_are_refused(file: Callable[[str], Path]) -> None:
    weight = torch.zeros(ROWS, 10, dtype=torch.uint8)
    assert "(a shape of [48, 10] where [48, 96] is needed): choose" in refusal(file("nvfp4"), weight=weight)
    scale = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    assert "(scales of the shape [4, 4] where [128, 12] is needed)" in refusal(file("nvfp4"), weight_scale=scale)
    mark = torch.tensor(list(b'{"format": "int3"}'), dtype=torch.uint8)
    assert (
        "x.safetensors holds blocks.0.weight as int3, which this ComfyUI does not support (it supports float8_e4m3fn,"
    ) in refusal(file("int8"), comfy_quant=mark)
    damaged = torch.tensor(list(b'{"form'), dtype=torch.uint8)
    assert "x.safetensors has damaged quantisation settings (" in refusal(file("int8"), comfy_quant=damaged)


def test_a_format_unknown_to_this_pack_gives_comfyuis_bits(
    file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI's loader describes such a layer. The stand-in is a format that the test makes the pack forget."""
    monkeypatch.setattr(quantised_layers, "PACKED", "")
    path = file("w4a4")
    x = draw(2, 37, COLUMNS, seed=3)
    with torch.inference_mode():
        assert torch.equal(load(path)(x), stock(path)(x))
