"""What a worker does: one file for each kind of request, and the rank that they share."""
