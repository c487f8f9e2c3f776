"""Layers that hold their weights as files do, and cast or expand them where they are used."""
