"""Where a rank has its weights: whole, sharded or streamed, and off the device in host memory."""
