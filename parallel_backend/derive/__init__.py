"""Declarations found by looking at a model, and proved: `python -m parallel_backend.derive FILE`."""
