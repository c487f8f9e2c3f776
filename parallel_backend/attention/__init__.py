"""Attention of a sequence whose tokens are sharded over ranks; read `sequence_parallel.py` first (Ulysses, Ring, their product)."""
