"""Measures stock ComfyUI beside this pack, as a client of ComfyUIs.

`python -m parallel_backend.bench` starts them; the tab's benchmark is a client of the one that runs.
"""
