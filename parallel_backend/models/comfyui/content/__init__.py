"""The functions and files of ComfyUI that are known by the digests of their source."""
