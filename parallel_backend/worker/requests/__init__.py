"""The requests that a worker carries out, one file for each kind, and the rank that they share."""
