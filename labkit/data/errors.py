"""The one error of this room: what went wrong with data, in a sentence."""


class DataError(RuntimeError):
    """Data that can't be found, fetched, unpacked or read. The message says what, where, and what to do."""
