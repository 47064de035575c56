"""`expected`: an error that a lesson provokes on purpose. It is shown, and the lesson goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

from labkit.learn.surroundings import show_text
from labkit.words import _


class NothingHappened(AssertionError):
    """The error that a lesson wanted to show did not come."""


@contextmanager
def expected(kind: type[BaseException], containing: str = "") -> Iterator[None]:
    """Show the error of this kind that the body raises, and go on.

    Anything else, no error included, or an error whose text lacks `containing`, fails the cell.
    """
    try:
        yield
    except kind as error:
        if containing not in str(error):
            raise
        show_text(_("As expected, **{kind}**: {text}").format(kind=type(error).__name__, text=error))
    else:
        raise NothingHappened(_("a {kind} was expected here and none came").format(kind=kind.__name__))
