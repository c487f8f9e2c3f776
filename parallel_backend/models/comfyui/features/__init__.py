"""ComfyUI's features in a worker. The host's half of each feature has the same name in nodes/model/features."""
