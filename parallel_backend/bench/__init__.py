"""Measures stock ComfyUI beside this pack, as a client of ComfyUIs that it starts: `python -m parallel_backend.bench`."""
