"""The engine: plans, worker processes and the parallel denoise. Only `models/comfyui/` and the fork server import ComfyUI."""
