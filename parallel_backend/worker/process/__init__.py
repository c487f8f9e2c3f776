"""The process of a worker: its settings, start, connections and reported progress."""
