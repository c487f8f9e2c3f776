"""Settings for all tests."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)  # a busy machine is no failure
settings.load_profile("shared machine")
