"""Where the tokens of each family are: one short declaration a file."""
