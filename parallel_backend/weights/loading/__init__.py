"""A byte's way from a file into a layer, every byte read once a machine."""
