"""Communication between ranks. The caller passes the size of every rank's piece, so no sizes are exchanged."""
