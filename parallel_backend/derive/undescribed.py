"""What a model does that there is no word for."""


class Undescribed(Exception):
    """A reason why no declaration says what a model does, to stand behind "because"."""
