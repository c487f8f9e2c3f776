"""ComfyUI's own model classes: the one room of the backend that imports ComfyUI, and only where a model is at hand."""
