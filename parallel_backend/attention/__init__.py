"""Attention of a sequence that is sharded over ranks; read `sequence_parallel.py` first: Ulysses, Ring and their product."""
