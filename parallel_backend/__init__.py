"""The engine: plans, worker processes and the parallel denoise. Only `models/comfyui/` imports ComfyUI."""
