"""ComfyUI's detection by a file's values gives the same answers from the header and the needed tensors alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.comfy_family import ComfyFamily
from parallel_backend.models.comfyui.detection import detect
from parallel_backend.models.comfyui.file_values import ValueUnknown, file_values, named_values
from parallel_backend.models.comfyui.meta_model import make_model
from parallel_backend.weights.files.checkpoint import read_header
from tests.support.selection import thorough
from tests.support.tiny.comfyui import WIDE, save_header, save_tiny
from tests.support.tiny.formats import quantise

# isort: split
import comfy.model_detection
import comfy.ops
import comfy.supported_models
import comfy.utils

NUMBERS = torch.tensor([[0.5, -2.0, 3.0], [1.0, 0.25, 7.0]])

QUESTIONS: Mapping[str, Callable[[Tensor], Any]] = {
    "item of a spread": lambda t: torch.std(t, unbiased=False).item(),
    "comparison": lambda t: bool(t.max() > 6.5),
    "float": lambda t: float(t[1, 2]),
    "int": lambda t: int(t[0, 2]),
    "tolist": lambda t: t.tolist(),
    "tolist of a view": lambda t: t.T[1:].tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "equal": lambda t: torch.equal(t, t.clone()),
    "equal to a tensor of the host": lambda t: torch.equal(t, NUMBERS),
    "compared with a tensor of the host": lambda t: (t == NUMBERS).all().item(),
    "another type": lambda t: t.half().double().sum().item(),
    "where": lambda t: t.nonzero().shape[0],
    "selected": lambda t: t[t > 2].tolist(),
    "contains": lambda t: 0.25 in t,
    "copied into one of the host": lambda t: torch.zeros(2, 3).copy_(t).tolist(),
    "joined with one of the host": lambda t: torch.cat([NUMBERS, t]).sum().item(),
    "a parameter's": lambda t: torch.nn.Parameter(t).abs().max().item(),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that ends within the bytes of its last tensor, which no test reads."""
    path = tmp_path_factory.mktemp("values") / "model.safetensors"
    save_file({"small": NUMBERS, "z.large": torch.zeros(1000)}, path)
    return path


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_value_is_read_from_the_file(path: Path, question: str, inference: bool) -> None:
    checkpoint = read_header(path)
    tensors = checkpoint.meta_tensors()
    ask = QUESTIONS[question]
    with torch.inference_mode(inference), file_values(named_values(tensors, checkpoint.entries)):
        answer = ask(tensors["small"])
    assert answer == ask(NUMBERS)


def test_tensors_that_are_not_asked_for_are_not_read(path: Path, tmp_path: Path) -> None:
    checkpoint = read_header(path)
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes())
    entries = {
        name: type(entry)(entry.storage, entry.shape, entry.offset, cut) for name, entry in checkpoint.entries.items()
    }
    os.truncate(cut, entries["z.large"].offset + 8)
    tensors = checkpoint.meta_tensors()
    with file_values(named_values(tensors, entries)):
        assert tensors["small"].sum().item() == NUMBERS.sum().item()
        assert (tensors["z.large"] + 1).shape == (1000,)
    with pytest.raises(Refused, match="ends early: download it again"), file_values(named_values(tensors, entries)):
        tensors["z.large"].sum().item()


def test_an_unknown_value_is_raised_even_if_the_model_swallows_the_error(path: Path) -> None:
    checkpoint = read_header(path)
    tensors = checkpoint.meta_tensors()

    def ask(tensor: Tensor, change: bool) -> None:
        with file_values(named_values(tensors, checkpoint.entries)):
            if change:
                tensor.mul_(2)
            with suppress(Exception):  # as ComfyUI's detection does
                tensor[0].sum().item()

    with pytest.raises(ValueUnknown, match=r"of test_file_values.py asks for the values .* \[\]"):
        ask(torch.empty(4, device="meta"), False)
    ask(tensors["small"], False)
    with pytest.raises(ValueUnknown):
        ask(tensors["small"], True)


def test_a_class_that_swallows_an_unknown_value_is_made_with_real_values() -> None:
    """A model class that computes numbers of its own gets them, and its weights stay on the meta device."""

    class Model(torch.nn.Module):
        count = 0.0

        def __init__(self, device: torch.device) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(2, device=device))
            with suppress(Exception):
                self.count = torch.arange(4, device=device).sum().item()

    def get_model(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> Any:
        base = torch.nn.Module()
        base.diffusion_model = Model(device)
        return base

    described = SimpleNamespace(unet_config={}, get_model=get_model)
    made = make_model(described, {}, torch.float32).diffusion_model
    assert made.count == 6 and made.weight.is_meta


def stock(path: Path) -> Any:
    """Return ComfyUI's configuration of a file, from all of its values."""
    return comfy.model_detection.model_config_from_unet(comfy.utils.load_torch_file(str(path)), "")


@pytest.mark.parametrize("spread", [0.1, 0.6])
def test_z_image_has_the_compute_dtypes_that_comfyui_allows(tmp_path: Path, spread: float) -> None:
    """ComfyUI allows fp16 by the spread of a norm's values."""
    model = WIDE["wide_z_image"](comfy.ops.disable_weight_init, n_layers=2)
    path = save_header(tmp_path / "model.safetensors", model, "BF16", 2)
    entry = read_header(path).entries["layers.0.ffn_norm1.weight"]
    with path.open("r+b") as file:
        file.seek(entry.offset)
        values = 1 + spread * (torch.arange(entry.shape[0]) % 2 * 2 - 1)
        file.write(bytes(values.bfloat16().view(torch.uint8).tolist()))
    _, _, ours = detect(read_header(path))
    expected = stock(path)
    assert expected.unet_config["allow_fp16"] is (spread == 0.1)
    assert ours.unet_config["allow_fp16"] is expected.unet_config["allow_fp16"]
    assert ours.supported_inference_dtypes == expected.supported_inference_dtypes


MARKS: Mapping[str, Mapping[str, Tensor]] = {
    "edm_vpred": {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.004)},
    "v_pred": {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])},
}


@pytest.mark.parametrize("marks", ["edm_vpred", pytest.param("v_pred", marks=thorough)])
def test_markers_of_a_bare_sdxl_file_give_comfyuis_model_type(tmp_path: Path, marks: str) -> None:
    path = save_tiny(tmp_path, "sdxl")
    save_file({**load_file(path), **MARKS[marks]}, path)
    _, config = ComfyFamily().inspect(read_header(path))
    described = stock(path)
    expected = described.model_type(comfy.utils.load_torch_file(str(path)))
    assert config.base_model.model_type is expected
    assert config.described.sampling_settings == described.sampling_settings


@pytest.mark.parametrize(
    ("spread", "kind"), [(0.3, None), (0.05, Type.Q4_0), pytest.param(0.3, Type.Q4_0, marks=thorough)]
)
def test_stable_diffusion_2_has_the_prediction_type_of_its_file(
    tmp_path: Path, spread: float, kind: Type | None
) -> None:
    """The same holds in GGUF, with the values that the gguf package expands."""
    path = save_tiny(tmp_path, "sd20")
    bias = spread * (torch.arange(64) % 2 * 2.0 - 1)
    tensors = {**load_file(path), "output_blocks.11.1.transformer_blocks.0.norm1.bias": bias}
    save_file(tensors, path)
    model = path
    if kind is not None:
        model = quantise(tmp_path / "model.gguf", path, kind, tensors, {"general.architecture": "sd1"})
    _, config = ComfyFamily().inspect(read_header(model))
    assert config.base_model.model_type is stock(path).model_type(comfy.utils.load_torch_file(str(path)))
    assert config.base_model.model_type.name == ("EPS" if spread == 0.05 else "V_PREDICTION")


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0])
def test_values_of_gguf_blocks_equal_the_gguf_packages(tmp_path: Path, kind: Type) -> None:
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    path = quantise(tmp_path / "model.gguf", tmp_path / "plain.safetensors", kind, {"blocks.0.weight": values})
    checkpoint = read_header(path)
    tensors = checkpoint.meta_tensors()
    expected = load_file(tmp_path / "plain.safetensors")["blocks.0.weight"]
    with file_values(named_values(tensors, checkpoint.entries)):
        answer = tensors["blocks.0.weight"][2:5].tolist()
    assert answer == expected[2:5].tolist()
