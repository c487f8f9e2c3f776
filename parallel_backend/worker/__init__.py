"""A worker, which is one rank: `python -m parallel_backend.worker`, with the environment variables of torchrun."""
