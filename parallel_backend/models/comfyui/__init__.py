"""ComfyUI's own model classes. This is the backend's only package that imports ComfyUI, and it does so only to read a model."""
