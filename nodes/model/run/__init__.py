"""One run of a sampler: the checks that allow the workers' loop, and the request to the workers."""
