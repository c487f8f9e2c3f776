"""Models over diffusers' own modules, where ComfyUI's port is not the original: CogVideoX and PixArt."""
