"""What a plan costs: the model's and the machine's numbers, measured or known, and the cost model over them."""
