"""A lesson's parameters: refused in one sentence before any rank starts, and read by profile."""

from typing import Any, TypeVar

from labkit.words import _

PROFILES = ("quick", "lab", "gpu")
T = TypeVar("T")


class BadParameter(ValueError):
    """A parameter that the lesson can't run with; IPython shows its one sentence, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def require(name: str, value: Any, allowed: Any, unit: str = "") -> None:
    """Refuse a parameter whose `value` is not in `allowed`, a range or a collection.

    `require("world_size", world_size, range(1, 9), "ranks")` raises BadParameter where it is 0, 9, 2.0 or "two".
    """
    kinds = {type(one) for one in allowed}
    if type(value) in kinds and value in allowed:
        return
    if isinstance(allowed, range) and allowed.step == 1:
        message = _("{name} is {value}; give a whole number of {unit} from {first} to {last}.")
        words = {"first": allowed[0], "last": allowed[-1], "unit": unit or name}
    else:
        message = _("{name} is {value}; give one of {choices}.")
        words = {"choices": ", ".join(map(str, allowed))}
    raise BadParameter(message.format(name=name, value=repr(value), **words))


def choose(profile: str, *, quick: T, lab: T, gpu: T | None = None) -> T:
    """The value for the profile; "gpu" takes the lab's where it has none of its own."""
    require("profile", profile, PROFILES)
    return {"quick": quick, "lab": lab, "gpu": lab if gpu is None else gpu}[profile]
