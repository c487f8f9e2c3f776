"""Random autoencoders small enough for two CPU cores, with the tensor names of their files.

ComfyUI assumes that a CogVideoX VAE has 128 to 512 channels, so files for its loader have that size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parallel_backend.models.comfyui.reduced import repeated
from parallel_backend.vae import Autoencoder
from parallel_backend.vae.cogvideox import CogVideoXAutoencoder, CogVideoXAutoencoderConfig
from parallel_backend.vae.rows import Slab

SMALL = (32, 32, 64, 64)
REAL = (128, 256, 256, 512)


def cogvideox_vae_tensors(widths: tuple[int, ...] = SMALL, layers: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of a CogVideoX autoencoder."""
    return random_weights(CogVideoXAutoencoder(CogVideoXAutoencoderConfig(widths, layers, 16)).module, seed)


def save_cogvideox_vae(path: Path, dtype: torch.dtype = torch.float32, **settings: object) -> Path:
    """Write a file of an autoencoder with the settings of `cogvideox_vae_tensors`."""
    tensors = cogvideox_vae_tensors(**settings)  # type: ignore[arg-type]
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path)
    return path


def random_weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return random weights that keep activations near 1 and make every part matter."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in module.named_parameters():
        noise = repeated(parameter.shape, generator)
        if parameter.dim() > 1:
            tensors[name] = noise / parameter[0].numel() ** 0.5
        else:
            tensors[name] = 0.2 * noise + (1.0 if name.endswith("weight") else 0.0)
    return tensors


def cogvideox_vae() -> CogVideoXAutoencoder:
    """Return a small CogVideoX autoencoder with the weights of `cogvideox_vae_tensors`."""
    made = CogVideoXAutoencoder(CogVideoXAutoencoderConfig(SMALL, 1, 16))
    made.module.to_empty(device="cpu").load_state_dict(cogvideox_vae_tensors())
    return made


def diffusers_cogvideox_vae() -> Any:
    """Return diffusers' own autoencoder with the weights of `cogvideox_vae_tensors`."""
    from diffusers import AutoencoderKLCogVideoX

    made: Any = AutoencoderKLCogVideoX(block_out_channels=SMALL, layers_per_block=1, latent_channels=16)
    made.load_state_dict(cogvideox_vae_tensors())
    return made


def encoded(autoencoder: Autoencoder, pixels: Slab, schedule: str = "") -> Tensor:
    """Encode pixels to a latent. Rank 0 returns all of it, other ranks nothing. A collective."""
    pieces = autoencoder.encode(pixels, schedule, lambda layers=1: None)
    return torch.cat([piece.whole() for piece in pieces], dim=2)


def decoded(autoencoder: Autoencoder, latent: Slab, schedule: str = "") -> Tensor:
    """Decode a latent to a picture or to all frames of a clip. Rank 0 returns all of it, other ranks nothing. A collective."""
    pieces: list[Tensor] = []
    autoencoder.decode(latent, schedule, lambda layers=1: None, lambda piece: pieces.append(piece.whole()))
    return torch.cat(pieces, dim=2)
