"""Checkpoints: headers and byte-range reads, key maps, and layers that cast their weights where they are used."""
