"""The engine: plans, worker processes and the parallel denoise. Imports no ComfyUI module."""
