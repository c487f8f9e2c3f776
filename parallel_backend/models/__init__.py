"""Models: ComfyUI's and two of diffusers, parallelised from a declaration of each; `families.py` has the registry."""
