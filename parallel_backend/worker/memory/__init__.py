"""The models, files and adapters that a worker holds, and the memory for them."""
