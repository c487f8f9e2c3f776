"""The layers that keep the dtype of their file where ComfyUI loads dynamically are those of ComfyUI's own list."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.models.comfyui.dynamic_loading import SMALL_MODULE, file_dtypes
from parallel_backend.models.families import FAMILIES
from parallel_backend.weights.files.checkpoint import read_header
from tests.support.comfy_oracle import comfy_on_path
from tests.support.tiny.comfyui import save_tiny
from tests.support.tiny.flux import flux_tensors

from .test_merged_fp8 import ALL, Case

FP8 = torch.float8_e4m3fn


def by_comfyui(path: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Return a file's tensors by ComfyUI's names, and the names of those in layers that its dynamic loader treats as small."""
    import comfy.sd

    patcher = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": FP8})
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
    comfy_on_path()
    import comfy.model_patcher

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


def test_a_worker_keeps_small_layers_as_the_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dynamic loading every weight is rounded to fp8. With dynamic loading only weights of large layers are."""
    case = Case(tmp_path, monkeypatch, torch.bfloat16, FP8)
    tensors, small = by_comfyui(case.path)
    for dynamic in (False, True):
        part = case.part(dynamic=dynamic)
        for name, parameter in part.module.named_parameters():
            rounded = tensors[name] if dynamic and name in small else tensors[name].to(FP8)
            found = part.store.full(name)
            found = found.view(FP8) if parameter.dtype == torch.uint8 else found
            assert torch.equal(found.float(), rounded.float()), (name, dynamic)
    assert small
    assert any(not torch.equal(tensors[name], tensors[name].to(FP8).to(torch.bfloat16)) for name in small)
