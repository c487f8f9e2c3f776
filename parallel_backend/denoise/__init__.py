"""The denoise on the workers: samplers, guidance, inpainting and the parallel forward of the model."""
