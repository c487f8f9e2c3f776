"""The CLIP whose weights the workers hold."""
