"""How work is shared out: tokens among ranks, blocks among stages."""
