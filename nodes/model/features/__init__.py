"""ComfyUI's features on a MODEL, each as the workers are told of it; the worker's half has the same name in models/comfyui."""
