"""ComfyUI's features in a worker; the host's half of each has the same name in nodes/model/features."""
