"""Messages between ComfyUI's process and the workers: typed messages and raw tensor bytes, no pickle."""
