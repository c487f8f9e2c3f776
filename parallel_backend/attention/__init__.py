"""Attention over ranks: kernels that return (out, LSE), their merge, and Ulysses x Ring."""
