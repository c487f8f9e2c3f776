"""Unusual VAE files: with only a decoder, with only an encoder, and with a decoder of 12 output channels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel_backend.errors import Refused
from parallel_backend.vae import AUTOENCODERS, recognise
from parallel_backend.vae.rows import slab_of
from parallel_backend.weights.files.checkpoint import read_header
from tests.support.comfy_oracle import comfy_on_path
from tests.support.latents import relative_error
from tests.support.rank_parts import everyone
from tests.support.ranks import run_ranks
from tests.support.tiny.vae import SMALL, cogvideox_vae_tensors, decoded
from tests.vae.comfy_vaes import build, save_comfy_vae, save_image_vae

comfy_on_path()
import comfy.sd  # noqa: E402 (once it can be found)

TOLERANCE = 1e-5


def over_ranks(path: Path, latent: Tensor) -> Tensor:
    """Return the pixels that two ranks decode with the file's tensors."""
    name, part, config = recognise(read_header(path))
    family, tensors = AUTOENCODERS[name], load_file(path)
    keys = family.keys(config, part)
    values: Mapping[str, Tensor] = {key: tensors[piece.name] for key, piece in keys.items()}

    def rank(_: int) -> Tensor:
        ours = family.build(config)
        module: nn.Module = ours.module
        for key, tensor in values.items():
            owner, _, last = key.rpartition(".")
            setattr(
                module.get_submodule(owner), last, nn.Parameter(tensor.view(module.get_parameter(key).shape), False)
            )
        with torch.inference_mode():
            return decoded(ours, slab_of(latent, everyone("rows")))

    return run_ranks(2, rank)[0]


def stock(path: Path, latent: Tensor) -> Tensor:
    """Return the pixels that ComfyUI's own loader decodes with the same file."""
    from comfy.utils import load_torch_file

    tensors, metadata = load_torch_file(str(path), return_metadata=True)
    vae = comfy.sd.VAE(sd=tensors, metadata=metadata)
    vae.first_stage_model.float()
    vae.first_stage_model.load_state_dict(load_file(path), strict=False)
    with torch.inference_mode():
        return vae.first_stage_model.decode(latent)  # type: ignore[no-any-return]


def compare(path: Path, shape: tuple[int, ...]) -> Tensor:
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = over_ranks(path, latent), stock(path, latent)
    name, _, config = recognise(read_header(path))
    assert ours.shape == theirs.shape == AUTOENCODERS[name].decoded_shape(config, shape)
    assert relative_error(ours, theirs) <= TOLERANCE
    return ours


@pytest.mark.parametrize(("name", "latent"), [("flux", (1, 16, 5, 3)), ("ltx", (1, 128, 2, 5, 2))])
def test_a_file_with_only_a_decoder_decodes_and_one_with_only_an_encoder_is_refused(
    tmp_path: Path, name: str, latent: tuple[int, ...]
) -> None:
    path = tmp_path / f"{name}.safetensors"
    if name == "flux":
        save_image_vae(path)
    else:
        save_comfy_vae(path, name)
    whole = recognise(read_header(path))
    assert AUTOENCODERS[whole[0]].missing(whole[2]) == ""
    metadata = dict(read_header(path).metadata)
    tensors = load_file(path)
    save_file({key: each for key, each in tensors.items() if not key.startswith("encoder.")}, path, metadata)
    kind, _, config = recognise(read_header(path))
    assert AUTOENCODERS[kind].missing(config).startswith("encoder.")
    compare(path, latent)
    encoder = {key: each for key, each in tensors.items() if key.startswith("encoder.")}
    assert comfy.sd.VAE(sd=dict(encoder)).first_stage_model is None
    save_file(encoder, path)
    with pytest.raises(Refused, match="has no tensors of a VAE: choose a VAE file"):
        recognise(read_header(path))


def test_a_file_with_only_cogvideox_decoder_has_the_same_configuration(tmp_path: Path) -> None:
    tensors = cogvideox_vae_tensors()
    save_file(tensors, tmp_path / "whole.safetensors")
    decoder = {name: each for name, each in tensors.items() if name.startswith("decoder.")}
    save_file(decoder, tmp_path / "decoder.safetensors")
    name, part, config = recognise(read_header(tmp_path / "decoder.safetensors"))
    assert (name, config.widths, config.layers, config.latent_channels) == ("cogvideox vae", SMALL, 1, 16)
    assert AUTOENCODERS[name].missing(config) == "encoder.conv_in.conv.weight"
    assert AUTOENCODERS[name].keys(config, part).keys() == decoder.keys()


def test_a_wan_vae_with_a_head_of_12_channels_decodes_them(tmp_path: Path) -> None:
    tensors = {name: each.contiguous() for name, each in build("wan", conv_out_channels=12).state_dict().items()}
    save_file(tensors, tmp_path / "wan.safetensors")
    assert compare(tmp_path / "wan.safetensors", (1, 16, 2, 5, 3)).shape[1] == 12
