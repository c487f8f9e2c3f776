"""ComfyUI's models and two of diffusers'. A declaration says how each is parallelised; `families.py` has the registry."""
