"""Worker processes: their start, the connections to them, the watch over them, and the diagnosis of their failures."""
