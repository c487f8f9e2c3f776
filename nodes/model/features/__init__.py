"""ComfyUI's features on a MODEL, in ComfyUI's process. The worker's half of each has the same name in models/comfyui."""
