"""The error of this room."""


class InputError(Exception):
    """The user's input or arguments cannot be used; the message is one line that says why."""
