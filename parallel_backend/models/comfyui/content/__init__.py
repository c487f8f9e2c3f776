"""Identification of ComfyUI's functions and files by the digests of their source."""
