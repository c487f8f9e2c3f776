"""The devices a plan names, and which of a machine's are worth using together."""
