"""The loop over steps that most of these samplers share."""

REMEMBERED = 0
"""A number that a sampler of another module counts up."""


def along(step):
    """Return a sampler that applies a step: (i, x, denoised, sigma, sigma_next) -> x, in Euler's loop."""

    def sample(model, x, sigmas, extra_args=None, callback=None, disable=None, **options):
        ones = x.new_ones([x.shape[0]])
        for i in range(len(sigmas) - 1):
            denoised = model(x, sigmas[i] * ones, **extra_args)
            if callback is not None:
                callback({"x": x, "i": i, "sigma": sigmas[i], "sigma_hat": sigmas[i], "denoised": denoised})
            x = step(i, x, denoised, sigmas[i], sigmas[i + 1], **options)
        return x

    sample.__name__ = step.__name__
    return sample
