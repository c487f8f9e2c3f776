"""What a worker holds: stages of models and where their files are, adapters, and the memory for them."""
