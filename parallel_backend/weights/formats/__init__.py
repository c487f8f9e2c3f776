"""How values lie in bytes: plain types, and blocks of quantised values."""
