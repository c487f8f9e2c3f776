"""Measures stock ComfyUI beside this pack, as a client of ComfyUIs: `python -m parallel_backend.bench` starts them, the tab's is its own."""
