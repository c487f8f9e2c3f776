"""One rank: `python -m parallel_backend.worker`, its environment as torchrun sets it."""
