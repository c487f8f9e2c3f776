"""Memory shared by ComfyUI and the workers: each frees device memory for the other."""
