"""LoRA and related adapters in the weights: merged, or applied where a weight is expanded."""
