"""Record ComfyUI's sampler functions: run each once on a latent without data that records all operations."""
