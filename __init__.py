"""Parallel denoising for ComfyUI: one picture or video on several GPUs."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():  # type: ignore[no-untyped-def]
    """ComfyUI's hook for custom nodes."""
    from .nodes import ParallelExtension

    return ParallelExtension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
