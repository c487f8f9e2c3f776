"""Sequence parallelism for a model's own forward, driven by declarations: streams, attention, pipeline stages, patches."""
