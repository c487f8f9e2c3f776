"""Random autoencoders small enough for two CPU cores, with the tensor names of their files.

ComfyUI takes a CogVideoX VAE to have 128 to 512 channels, and the encoder of an image VAE to have 128, so files for its
loader are of that size; `comfyui` says so.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from parallel_backend.vae.cogvideox import CogVideoXAutoencoder, CogVideoXConfig
from parallel_backend.vae.kl import KLAutoencoder, KLConfig
from parallel_backend.weights.vae_keys import original_kl_name

SMALL = (32, 32, 64, 64)
REAL = (128, 256, 256, 512)


def cogvideox_vae_tensors(widths: tuple[int, ...] = SMALL, layers: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """A CogVideoX autoencoder's tensors."""
    return random_weights(CogVideoXAutoencoder(CogVideoXConfig(widths, layers, 16)).module, seed)


def image_vae_tensors(
    *, channels: int = 16, encoder: int = 32, decoder: int = 32, moments: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """An image autoencoder's tensors with the original's (ComfyUI's) names."""
    tensors = random_weights(KLAutoencoder(KLConfig(encoder, decoder, channels, moments)).module, seed)
    named = {original_kl_name(name, 4): tensor for name, tensor in tensors.items()}
    convolutions = [name for name in named if ".attn_1." in name and named[name].dim() == 2]
    return named | {name: named[name][:, :, None, None] for name in convolutions}


def save_cogvideox_vae(path: Path, dtype: torch.dtype = torch.float32, **settings: object) -> Path:
    """Write a file; settings as for `cogvideox_vae_tensors`."""
    tensors = cogvideox_vae_tensors(**settings)  # type: ignore[arg-type]
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path)
    return path


def save_image_vae(path: Path, dtype: torch.dtype = torch.float32, **settings: object) -> Path:
    """Write a file; settings as for `image_vae_tensors`."""
    tensors = image_vae_tensors(**settings)  # type: ignore[arg-type]
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, path)
    return path


def random_weights(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Weights that keep activations near 1 and make every part matter."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            tensors[name] = noise / parameter[0].numel() ** 0.5
        else:
            tensors[name] = 0.2 * noise + (1.0 if name.endswith("weight") else 0.0)
    return tensors
