"""The denoise: samplers, guidance, inpainting and one parallel forward of the model."""
