"""Headers of checkpoints: the position of each tensor, and the tensors that make a module's parameters."""
