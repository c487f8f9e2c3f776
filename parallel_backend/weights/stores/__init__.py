"""Stores of a rank's weights: whole, sharded or streamed, and off the device in host memory."""
