"""ComfyUI's own model classes.

Only this package of the backend calls ComfyUI. It imports ComfyUI inside functions, because many processes do not need it.
The fork server of the workers imports it early.
"""
