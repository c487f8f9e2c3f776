"""Proofs that a model's own forward gives the same on one rank and in parallel, on a small model of its class."""
