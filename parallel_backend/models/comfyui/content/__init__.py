"""What of ComfyUI is known by content: digests of the functions that this pack stands in for, and of all that they call."""
