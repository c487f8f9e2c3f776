"""ComfyUI's sampler functions, run once on a latent without data that writes down what is done to it."""
