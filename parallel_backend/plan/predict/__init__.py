"""The cost model of plans, and its inputs: the figures of models and machines, measured or known."""
