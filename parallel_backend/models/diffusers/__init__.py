"""Models that run on diffusers' own modules, because ComfyUI's port differs from the original: CogVideoX and PixArt."""
