"""The proxy VAE: ComfyUI's own VAE class with its model in the workers."""

from .vae import ParallelVAE, load_vae

__all__ = ["ParallelVAE", "load_vae"]
