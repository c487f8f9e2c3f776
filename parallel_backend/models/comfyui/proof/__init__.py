"""Whether a model's own forward gives the same alone and spread over ranks, tried on a small model of its class."""
