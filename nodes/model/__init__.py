"""The MODEL: ComfyUI's own model class without weights, and the wrapper that runs its denoise in the workers."""
