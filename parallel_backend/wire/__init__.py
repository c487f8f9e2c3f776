"""What crosses between ComfyUI's process and the workers: typed messages and raw tensor bytes. No pickle."""
