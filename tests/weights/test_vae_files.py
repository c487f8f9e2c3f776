"""The kind of VAE in a file: both namings, prefixes of full checkpoints, and refused files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel_backend.errors import Refused
from parallel_backend.vae import AUTOENCODERS, recognise
from parallel_backend.vae.cogvideox import CogVideoXAutoencoderConfig
from parallel_backend.weights.files.checkpoint import read_header
from tests.support.tiny.vae import SMALL, cogvideox_vae_tensors
from tests.vae.comfy_vaes import OF_A_FILE, build


def header(path: Path, tensors: dict[str, Tensor], prefix: str = ""):
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, path / "vae.safetensors")
    return read_header(path / "vae.safetensors")


def test_the_kind_of_a_vae_file_is_found_under_each_prefix(tmp_path: Path) -> None:
    videos, pictures = cogvideox_vae_tensors(), build("sd", **OF_A_FILE, decoder_ch=32).state_dict()
    for prefix in ("", "first_stage_model.", "vae."):
        name, _, config = recognise(header(tmp_path, videos, prefix))
        assert (name, config) == ("cogvideox vae", CogVideoXAutoencoderConfig(SMALL, 1, 16))
        name, _, config = recognise(header(tmp_path, pictures, prefix))
        family = AUTOENCODERS[name]
        assert (name, family.channels(config), family.dims(config)) == ("comfyui vae", 4, 4)
        assert family.decoded_shape(config, (2, 4, 5, 3)) == (2, 3, 40, 24)


def test_diffusers_names_map_to_comfyuis(tmp_path: Path) -> None:
    import comfy.sd
    from diffusers import AutoencoderKL

    newer = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).state_dict()
    older = newer
    for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
        older = {name.replace(f".{new}.", f".{old}."): tensor for name, tensor in older.items()}
    expected = comfy.sd.VAE(sd=dict(newer)).first_stage_model.state_dict()
    for tensors in (newer, older):
        name, part, config = recognise(header(tmp_path, tensors))
        keys = AUTOENCODERS[name].keys(config, part)
        assert keys.keys() == expected.keys()
        for key, piece in keys.items():
            assert torch.equal(expected[key].float().flatten(), tensors[piece.name].flatten()), key


REFUSED = {
    "no tensors of a VAE": {"blocks.0.weight": torch.zeros(8, 16)},
    "lacks the tensor decoder.": {"decoder.conv_in.weight": torch.zeros(128, 16, 3, 3)},
    "has tensors of other sizes than ComfyUI's VAE of this kind": {
        "decoder.conv_in.weight": torch.zeros(128, 16, 3, 3),
        "encoder.conv_in.weight": torch.zeros(32, 3, 3, 3),
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_files_without_a_fitting_vae_are_refused(tmp_path: Path, words: str) -> None:
    with pytest.raises(Refused, match=words) as refusal:
        recognise(header(tmp_path, REFUSED[words]))
    assert str(refusal.value).startswith("vae.safetensors ") and str(refusal.value).endswith(".")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(7), r"with the shape \[7\] where \[32\] is needed"),
        (torch.zeros(32, dtype=torch.int8), "choose a VAE file in fp32, fp16 or bf16"),
    ],
)
def test_a_tensor_of_another_shape_or_of_integers_is_refused(tmp_path: Path, tensor: Tensor, words: str) -> None:
    with pytest.raises(Refused, match=words):
        recognise(header(tmp_path, cogvideox_vae_tensors() | {"decoder.norm_out.norm_layer.weight": tensor}))
