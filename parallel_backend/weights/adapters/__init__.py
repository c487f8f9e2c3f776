"""LoRA and its kin in the weights: merged, or applied where a weight is expanded."""
