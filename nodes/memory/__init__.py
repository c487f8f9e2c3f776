"""ComfyUI's memory management and the workers': who makes room for whom, on which device."""
