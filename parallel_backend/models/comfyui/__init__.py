"""ComfyUI's own model classes.

The backend imports ComfyUI only through this package, and only when a model is to be detected, built or run.
"""
