"""Lesson 04: three broken wrappers, whose faults are to be found."""

from collections.abc import Callable, Mapping
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

WRAPPERS = ("willow", "rowan", "linden")

#: what may be wrong, and how it would show
FAULTS = {
    "averages parameters": _("then backward would move the weights, which a print before and after it tells"),
    "forgets to divide": _("then already the first gradient would be N times too long, in every trial"),
    "ranks start apart": _("then the first gradient would be wrong where seeds differ, and only there"),
    "sums again": _("then one backward would be right, and a second one that adds to it wrong"),
    "mixes up places": _("then it would be right where all layers have the same shape, and wrong where they don't"),
    "leaves out the last layer": _("then the ranks' gradients of the last layer would differ in every trial"),
}
RIGHT = {"willow": "ranks start apart", "rowan": "sums again", "linden": "mixes up places"}


def named(function: Callable[..., Any]) -> dict[str, str]:
    """The answer: for each wrapper one of the faults."""
    given = function()
    wanted = _("a dict with a fault for each of {wrappers}").format(wrappers=", ".join(WRAPPERS))
    if not isinstance(given, Mapping):
        raise Nonsense(describe(given), wanted)
    for name in WRAPPERS:
        if name not in given:
            raise Nonsense(_("a dict without {name}").format(name=name), wanted)
        if given[name] not in FAULTS:
            choices = _("one of: {faults}").format(faults=", ".join(FAULTS))
            raise Nonsense(_("for {name}: {what}").format(name=name, what=describe(given[name])), choices)
    return {name: str(given[name]) for name in WRAPPERS}


def _judge(name: str) -> Callable[[Outcome], Finding]:
    def judge(outcome: Outcome) -> Finding:
        said = outcome.values[0][name]
        if said == RIGHT[name]:
            return Finding(True)
        wanted = _("the fault that explains when {name} is right and when wrong").format(name=name)
        return Finding(False, wanted, said, _(FAULTS[said]))

    return judge


def all_average_parameters() -> dict[str, str]:
    return dict.fromkeys(WRAPPERS, "averages parameters")


def rowan_forgets_to_divide() -> dict[str, str]:
    return {**RIGHT, "rowan": "forgets to divide"}


def linden_leaves_out_the_last() -> dict[str, str]:
    return {**RIGHT, "linden": "leaves out the last layer"}


def takes_two_for_each_other() -> dict[str, str]:
    return {**RIGHT, "rowan": RIGHT["linden"], "linden": RIGHT["rowan"]}


def leaves_one_out() -> dict[str, str]:
    return {"willow": RIGHT["willow"], "rowan": RIGHT["rowan"]}


register(
    Exercise(
        id="faults",
        lesson="04",
        title=_("Find the fault in three broken wrappers"),
        dots=3,
        minutes=15,
        answer="faults",
        hints=(
            _("Change one thing at a time: `distance(Willow, seeds=[0, 1])`, `distance(Rowan, micro_batches=2)`, "
              "`distance(Linden, widths=[6, 6, 6])`. When is each right?"),
            _("Willow is right where all ranks draw the same first weights. What should a wrapper do when it is "
              "built?"),
            _("Rowan's hook runs after each backward, on all that `grad` holds by then. Linden joins the gradients in "
              "one order. In which does it take them apart?"),
        ),
        properties=tuple(
            Property(name, _("the fault of {name}").format(name=name), _judge(name)) for name in WRAPPERS
        ),
        trials=(Trial(_("the three answers"), drive=named),),
        wrong_answers=(
            WrongAnswer("all average parameters", all_average_parameters, "willow", "move the weights"),
            WrongAnswer("rowan forgets to divide", rowan_forgets_to_divide, "rowan", "already the first gradient"),
            WrongAnswer("linden leaves out the last", linden_leaves_out_the_last, "linden", "of the last layer"),
            WrongAnswer("takes two for each other", takes_two_for_each_other, "rowan", "the same shape"),
            WrongAnswer("leaves one out", leaves_one_out, "type", ""),
        ),
    )
)  # fmt: skip
