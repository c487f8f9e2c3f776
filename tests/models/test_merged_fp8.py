"""Adapters on plain fp8 weights give the bits of ComfyUI's own patched weights, in every store, and leave no trace when
removed. The layers that keep the dtype of their file where ComfyUI loads dynamically are those of ComfyUI's own list.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel_backend.comm.meter import Meter
from parallel_backend.diffusion import ModelSpec
from parallel_backend.models.comfyui.dynamic_loading import SMALL_MODULE, file_dtypes
from parallel_backend.models.comfyui.features.lora import merging_dtype
from parallel_backend.models.families import FAMILIES
from parallel_backend.models.family import Stage
from parallel_backend.weights.adapters.lora import NONE, AdapterSet
from parallel_backend.weights.files.checkpoint import read_header
from parallel_backend.weights.files.keymap import Piece, tensor_sizes
from parallel_backend.weights.formats import PLAIN
from parallel_backend.weights.layers.cast import pack
from parallel_backend.weights.layers.packing import packed_starts
from parallel_backend.weights.stores.replicated import ReplicatedStore
from parallel_backend.weights.stores.sharded import Sharded
from parallel_backend.weights.stores.store import BlockAccess, WeightStore
from parallel_backend.weights.stores.streamed import Streamed
from parallel_backend.worker.memory.stage_part import StagePart
from tests.support.nodes_module import ForGood, nodes_module
from tests.support.rank_parts import CPU, LORA, everyone, keep, neighbours, patching, watch
from tests.support.ranks import run_ranks
from tests.support.selection import product
from tests.support.tiny.comfyui import save_tiny
from tests.support.tiny.flux import HEAD_DIM, flux_tensors
from tests.support.tiny.lora import SCHEMES, adapter_tensors
from tests.support.tiny.models import draw

# isort: split
import comfy.model_management
import comfy.model_patcher
import comfy.sd
from comfy.weight_adapter import LoRAAdapter

E4M3FN = torch.float8_e4m3fn
FP8 = {"e4m3fn": E4M3FN, "e5m2": torch.float8_e5m2}
FILES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""The dtypes of a file's tensors."""

HEADS = 1  # no attention is computed here
BLOCKS = 3
ALL = Stage(0, BLOCKS, BLOCKS)
PLACES = ("whole", "sharded", "streamed", "stages")
Stack = Sequence[tuple[str, float]]
Make = Callable[[torch.dtype, torch.dtype], "Case"]
ADDS_IN = {"as on the CPU": torch.float32, "as on a GPU": torch.float16}
STRENGTHS = (0.7, 1.0, -0.3)


class Case:
    """A file, and the dtype in which ComfyUI is told to hold it."""

    def __init__(self, folder: Path, file: torch.dtype, dtype: torch.dtype) -> None:
        self.path, self.dtype = folder / "tiny.safetensors", dtype
        save_file(flux_tensors(heads=HEADS, seed=4, dtype=file), self.path)
        self.family = FAMILIES["comfyui"]
        part, config = self.family.inspect(read_header(self.path))
        names = self.family.comfyui_keys(config)
        starts = packed_starts(part, self.family.keys(config), self.dtype, names)
        assert bool(starts) == (dtype not in FP8.values()), "where adapters are applied at each expansion"
        self.reader = nodes_module("model.features.lora", ForGood()).AdapterReader(tensor_sizes(names), starts)
        self.patched_keys = nodes_module("model.features.adapter_requests", ForGood()).patched_keys

    @functools.cached_property
    def unpatched(self) -> Any:
        """Return ComfyUI's model of the file."""
        return comfy.sd.load_diffusion_model(str(self.path), model_options={"dtype": self.dtype})

    def stock(self, stack: Stack) -> tuple[AdapterSet, dict[str, Tensor]]:
        """Return the adapters as ComfyUI records them, and its weights with the adapters applied."""

        model = self.unpatched
        for number, (scheme, strength) in enumerate(stack):
            tensors = adapter_tensors(scheme, number, hidden=HEADS * HEAD_DIM)
            model, _ = comfy.sd.load_lora_for_models(model, None, tensors, strength, 0.0)
        assert bool(model.patches) == bool(stack)
        adapters = self.reader.read(model.patches, tuple(stack), functools.partial(self.patched_keys, model))
        comfy.model_management.load_models_gpu([model], force_full_load=True)
        weights = {name: tensor.clone() for name, tensor in model.model.diffusion_model.state_dict().items()}
        comfy.model_management.unload_all_models()
        return adapters, weights

    def part(self, place: str = "whole", room: bool = True, stage: Stage = ALL, dynamic: bool = False) -> StagePart:
        """Return this rank's part of the model, as a worker loads it; `dynamic` as in ModelSpec."""

        def arrange(module: nn.Module, blocks: Sequence[nn.Module]) -> tuple[WeightStore, BlockAccess]:
            if place == "sharded":
                held = Sharded(module, blocks, everyone("all"))
                return held, held
            if place == "streamed":
                window = Streamed(module, blocks, everyone("all"), CPU, Meter())
                return window, window
            return ReplicatedStore(module), BlockAccess()

        state = self.path.stat()
        dtype = str(self.dtype).split(".")[1]
        spec = ModelSpec("comfyui", str(self.path), state.st_mtime_ns, state.st_size, dtype, dynamic=dynamic)
        made = StagePart(spec, stage, arrange, CPU, neighbours(), watch(), keep(room))
        made.fill()
        return made


def differing(part: StagePart, expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters whose bits differ from the expected ones. A collective."""
    found = []
    for name, _ in part.module.named_parameters():
        ours, theirs = part.store.full(name), expected[name]
        if ours.dtype == torch.uint8 and theirs.dtype in FP8.values():
            theirs = theirs.view(torch.uint8)
        elif ours.dtype == torch.uint8:
            ours = part.module.get_submodule(name.removesuffix(".weight")).full_weight(theirs.dtype)
        if not torch.equal(ours, theirs.to(ours.dtype)):
            found.append(name)
    return found


def merged(part: StagePart, runs: Sequence[tuple[AdapterSet, Mapping[str, Tensor]]]) -> list[list[str]]:
    """Return the differing parameters after each of these runs, one after the other."""
    found = []
    for adapters, expected in runs:
        part.adapt(adapters, watch())
        found.append(differing(part, expected))
    return found


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name].float(), after[name].float())}


def add_in(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Have ComfyUI add adapters in this dtype."""

    patch.setitem(comfy.model_management.LORA_COMPUTE_DTYPES, CPU, dtype)
    assert merging_dtype(False, CPU) == dtype


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes each case once."""
    return functools.cache(lambda file, dtype: Case(tmp_path_factory.mktemp("fp8"), file, dtype))


@product(place=PLACES, file=FILES, dtype=FP8)
def test_merged_adapters_equal_comfyuis_bits_in_every_store(
    case: Make, file: torch.dtype, dtype: torch.dtype, place: str
) -> None:
    """Two adapters at two strengths, and none, give the same bits: unsharded, sharded or streamed over two ranks, and in two
    stages.
    """
    tiny = case(file, dtype)
    stacks: list[Stack] = [
        [("lora-kohya", 0.7), ("dora-columns-of-parts", -0.3), ("diff", 1.0)],
        [("lora-kohya", 0.2), ("dora-columns-of-parts", -0.3), ("diff", 1.0)],
    ]
    _, before = tiny.stock([])
    stronger, weaker = (tiny.stock(stack) for stack in stacks)
    for _, weights in (stronger, weaker):
        assert len(changed(before, weights)) > 10
    assert changed(stronger[1], weaker[1])
    runs = [(NONE, before), stronger, weaker, stronger, (NONE, before)]

    def rank(number: int) -> Any:
        stage = ALL
        if place == "stages":
            stage = (Stage(0, 2, BLOCKS), Stage(2, BLOCKS, BLOCKS))[number]
        return [merged(tiny.part(place, room, stage), runs) for room in (True, False)]

    ranks = 1 if place == "whole" else 2
    assert run_ranks(ranks, rank) == [[[[]] * len(runs)] * 2] * ranks


@product(
    scheme=["lora-kohya", "dora-columns-of-parts", "diff"],
    adds_in=ADDS_IN,
    held={"bf16": torch.bfloat16, "fp32": torch.float32},
)
def test_adapters_on_an_fp8_file_equal_comfyuis_bits_where_comfyui_expands_it(
    case: Make, monkeypatch: pytest.MonkeyPatch, scheme: str, adds_in: torch.dtype, held: torch.dtype
) -> None:
    """ComfyUI expands an fp8 file on a GPU that does not multiply in fp8, if memory is free. Here it stays fp8, with equal
    values.
    """
    add_in(adds_in, monkeypatch)
    tiny = case(torch.float8_e4m3fn, held)
    runs = [tiny.stock([(scheme, strength)]) for strength in STRENGTHS]
    assert merged(tiny.part(), runs) == [[]] * len(runs)


@product(scheme=list(SCHEMES), adds_in=ADDS_IN)
def test_every_kind_of_adapter_gives_comfyuis_bits_in_fp8(
    case: Make, monkeypatch: pytest.MonkeyPatch, scheme: str, adds_in: torch.dtype
) -> None:
    """Each adapter has several strengths. On GPUs, ComfyUI adds adapters in fp16."""
    add_in(adds_in, monkeypatch)
    tiny = case(torch.bfloat16, torch.float8_e4m3fn)
    runs = [tiny.stock([(scheme, strength)]) for strength in STRENGTHS]
    assert changed(runs[0][1], runs[1][1])
    assert merged(tiny.part(), runs) == [[]] * len(runs)


@pytest.mark.parametrize("dtype", FP8.values(), ids=FP8)
def test_an_adapter_on_one_weight_equals_comfyuis_bits_in_layers_that_split_it(dtype: torch.dtype) -> None:
    """PixArt's q, k and v together have ComfyUI's bits, although the workers hold them as separate layers."""

    weight, up, down = (draw(12, 32, seed=1) / 6).to(dtype), draw(12, 4, seed=2), 0.1 * draw(4, 32, seed=3)
    theirs = nn.Module()
    theirs.diffusion_model = nn.Module()
    theirs.diffusion_model.qkv = nn.Linear(32, 12, bias=False)
    theirs.diffusion_model.qkv.weight = nn.Parameter(weight.clone(), requires_grad=False)
    patcher = comfy.model_patcher.ModelPatcher(theirs, CPU, CPU)
    patcher.add_patches({"diffusion_model.qkv.weight": LoRAAdapter(set(), (up, down, 4.0, None, None, None))}, 0.7)
    patcher.patch_weight_to_device("diffusion_model.qkv.weight", device_to=CPU)

    ours, keys = nn.Module(), {}
    for number, name in enumerate("qkv"):
        layer = nn.Linear(32, 4, bias=False, device="meta")
        pack(layer, PLAIN[dtype], scaled=False)
        rows = weight[4 * number : 4 * number + 4].view(torch.uint8).clone()
        layer.weight = nn.Parameter(rows, requires_grad=False)
        ours.add_module(name, layer)
        keys[f"{name}.weight"] = Piece("qkv.weight", 4 * number, 4 * number + 4, (32,))
    merging = patching(ours, ReplicatedStore(ours), keys, dtype=dtype)
    for adapters, expected in (
        (AdapterSet({"qkv.weight": [LORA]}, {"u": up, "d": down}), theirs.diffusion_model.qkv.weight),
        (NONE, weight),
    ):
        merging.merge(adapters)
        found = torch.cat([ours.get_submodule(name).weight for name in "qkv"])
        assert torch.equal(found, expected.view(torch.uint8))


def by_comfyui(path: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Return a file's tensors by ComfyUI's names, and the names of those in layers that its dynamic loader treats as small."""

    patcher = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": E4M3FN})
    tensors = patcher.model.model_config.process_unet_state_dict(load_file(path))
    patcher.model.diffusion_model.load_state_dict(tensors, assign=True)  # as the dynamic loader assigns them
    return tensors, {
        f"{name}.{key}".removeprefix("diffusion_model.")
        for *_, size, name, layer, keys in patcher._load_list(for_dynamic=True)
        for key in keys
        if hasattr(layer, "comfy_cast_weights") and size <= SMALL_MODULE
    }


def test_the_size_of_a_small_layer_is_comfyuis() -> None:
    """ComfyUI's own loader, which runs on NVIDIA GPUs alone, compares with the same number of bytes."""

    source = inspect.getsource(comfy.model_patcher.ModelPatcherDynamic.load)
    found = re.findall(r"if module_mem > ([\d *]+):", source)
    assert [math.prod(int(factor) for factor in each.split("*")) for each in found] == [SMALL_MODULE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_small_layers_are_those_of_comfyuis_list(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Both lists have the same parameters, each with the dtype of its file. Some layers are large and some are small."""
    path = save_tiny(tmp_path, "wan") if name == "wan" else tmp_path / "flux.safetensors"
    tensors = load_file(path) if name == "wan" else flux_tensors(heads=2, seed=4)
    save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, path)
    _, expected = by_comfyui(path)
    family = FAMILIES["comfyui"]
    part, config = family.inspect(read_header(path))
    module = family.build(config, ALL).module
    found = file_dtypes(module, part, family.keys(config))
    assert found == dict.fromkeys(expected, dtype)
    assert 0 < len(found) < len(list(module.parameters()))


def test_a_worker_keeps_small_layers_as_the_file_has_them(case: Make) -> None:
    """Compare both ways of loading: plain loading rounds every weight to fp8, dynamic loading only weights of large layers."""
    tiny = case(torch.bfloat16, E4M3FN)
    tensors, small = by_comfyui(tiny.path)
    for dynamic in (False, True):
        part = tiny.part(dynamic=dynamic)
        for name, parameter in part.module.named_parameters():
            rounded = tensors[name] if dynamic and name in small else tensors[name].to(E4M3FN)
            found = part.store.full(name)
            found = found.view(E4M3FN) if parameter.dtype == torch.uint8 else found
            assert torch.equal(found.float(), rounded.float()), (name, dynamic)
    assert small
    assert any(not torch.equal(tensors[name], tensors[name].to(E4M3FN).to(torch.bfloat16)) for name in small)
