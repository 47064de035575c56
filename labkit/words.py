"""Translation of what the workbook says: gettext, with English as the source.

Only `show` and `learn` speak to a reader, so only they mark strings, as `_("...")`. A translation is a
gettext catalogue in `labkit/locale/<language>/LC_MESSAGES/labkit.mo`; the language comes from the usual
environment variables (LANGUAGE, LC_ALL, LC_MESSAGES, LANG).
"""

import gettext
from pathlib import Path

_LOCALE = Path(__file__).parent / "locale"


def _(message: str) -> str:
    """The message in the reader's language, or as it stands where there is no translation."""
    return gettext.translation("labkit", _LOCALE, fallback=True).gettext(message)
