"""A worker as a process: what it is told, how it starts and is reached, what it says of itself."""
