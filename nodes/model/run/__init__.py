"""One run of a sampler: whether the workers' loop does it, and what they are told of it."""
