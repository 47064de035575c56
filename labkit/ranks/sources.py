"""Source lines of notebook cells, so that a traceback from a rank shows the learner's own lines."""

import linecache
import sys

Sources = dict[str, list[str]]


def cell_sources(known: set[str]) -> Sources:
    """The lines of every notebook cell run so far, by file name, except those in `known`, which grows by them."""
    if "IPython" not in sys.modules:
        return {}
    new = {
        name: entry[2]
        for name, entry in list(linecache.cache.items())
        # IPython's entries have no modification time: they are no files
        if len(entry) == 4 and entry[1] is None and name not in known and ("ipykernel" in name or "ipython" in name)
    }
    known.update(new)
    return new


def remember(sources: Sources) -> None:
    """Make these lines known to tracebacks in this process."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
