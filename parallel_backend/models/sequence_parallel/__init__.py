"""One mechanism that spreads a model's own forward over ranks: streams, declarations, attention, stages, patches."""
