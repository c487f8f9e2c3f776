"""Finds the declarations of models by probing and proves them: `python -m parallel_backend.derive FILE`."""
