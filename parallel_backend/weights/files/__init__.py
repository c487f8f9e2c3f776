"""Checkpoints by their headers: which tensor lies where, and what a module's parameters are made of."""
