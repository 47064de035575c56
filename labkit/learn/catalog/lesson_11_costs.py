"""Lesson 11: what a stage holds and sends, by formula; and three sharded layers that save nothing."""

from collections.abc import Callable, Mapping
from typing import Any

from labkit.learn.exercises import Exercise, Trial, WrongAnswer, register
from labkit.learn.nonsense import Nonsense, describe
from labkit.learn.observations import Outcome
from labkit.learn.properties import Finding, Property
from labkit.words import _

# --- predict bytes and memory ---

CASES = [(stage, parameters, ranks) for stage in (0, 1, 2, 3) for parameters, ranks in ((12e6, 8), (7.5e9, 64))]


def all_costs(function: Callable[..., Any]) -> list[tuple[float, float]]:
    """The answer's bytes held and elements sent in every case."""
    found = []
    for case in CASES:
        given = function(*case)
        wanted = _("a pair of numbers: bytes that a rank holds, elements that it sends")
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise Nonsense(describe(given), wanted)
        try:
            found.append((float(given[0]), float(given[1])))
        except (TypeError, ValueError):
            raise Nonsense(describe(given), wanted) from None
    return found


def held(stage: int, parameters: float, ranks: int) -> float:
    """Bytes on a rank, in mixed precision with Adam."""
    from labkit.parallel.zero.formulas import MIXED, state_per_rank

    return sum(state_per_rank(stage, parameters, ranks, MIXED).values())


def held_without_masters(stage: int, parameters: float, ranks: int) -> float:
    """Bytes on a rank if the optimizer kept its two moments only."""
    from labkit.parallel.zero.formulas import BytesPerParameter, state_per_rank

    return sum(state_per_rank(stage, parameters, ranks, BytesPerParameter(2, 2, 8)).values())


def held_in_float32(stage: int, parameters: float, ranks: int) -> float:
    """Bytes on a rank if all were float32."""
    from labkit.parallel.zero.formulas import FLOAT32, state_per_rank

    return sum(state_per_rank(stage, parameters, ranks, FLOAT32).values())


def sent(stage: int, parameters: float, ranks: int) -> float:
    """Elements that a rank sends in a step."""
    from labkit.parallel.zero.formulas import sent_per_step

    return sent_per_step(stage, parameters, ranks)


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)


def _memory(outcome: Outcome) -> Finding:
    for case, (found, _sent) in zip(CASES, outcome.values[0], strict=True):
        wanted = held(*case)
        if not _near(found, wanted):
            measured = _("stage {stage}, P = {p:g}, N = {n}: {found:.4g} bytes").format(
                stage=case[0], p=case[1], n=case[2], found=found
            )
            return Finding(False, _("{wanted:.4g} bytes").format(wanted=wanted), measured, _memory_cause(found, case))
    return Finding(True)


def _memory_cause(found: float, case: tuple[int, float, int]) -> str:
    stage, parameters, ranks = case
    if _near(found, held_without_masters(*case)):
        return _("the float32 copy of the weights is missing: Adam in mixed precision keeps 12 bytes a parameter")
    if _near(found, held_in_float32(*case)):
        return _("these are the bytes of float32, 4, 4 and 8: in mixed precision they are 2, 2 and 12")
    if stage and _near(found, held(0, parameters, ranks) / ranks):
        return _("only stage 3 shards everything")
    if any(_near(found, held(other, parameters, ranks)) for other in range(4) if other != stage):
        return _("this is another stage: 1 shards the optimizer's state, 2 gradients too, 3 parameters too")
    return ""


def _traffic(outcome: Outcome) -> Finding:
    for case, (_held, found) in zip(CASES, outcome.values[0], strict=True):
        wanted = sent(*case)
        if _near(found, wanted):
            continue
        stage, parameters, ranks = case
        cause = ""
        if _near(found, wanted * ranks / (ranks - 1)):
            cause = _("a rank does not send its own part: times (N - 1) / N")
        elif stage < 3 and _near(found, wanted / 2):
            cause = _("this is one half: gradients are reduce-scattered, and what was reduced or stepped is gathered")
        elif _near(found, 2 * wanted):
            cause = _("are these bytes? Elements are asked for")
        elif stage == 3 and _near(found, 4 / 3 * wanted):
            cause = _("two gathers and one reduce-scatter are three times P (N - 1) / N")
        elif stage == 3 and _near(found, sent(2, parameters, ranks)):
            cause = _("stage 3 gathers parameters in forward and once more in backward")
        elif stage in (1, 2) and _near(found, sent(3, parameters, ranks)):
            cause = _("a reduce-scatter and an all-gather are as much as one all-reduce, not more")
        measured = _("stage {stage}, N = {n}: {found:.4g} elements").format(stage=stage, n=ranks, found=found)
        return Finding(False, _("{wanted:.4g} elements").format(wanted=wanted), measured, cause)
    return Finding(True)


def without_masters(stage: int, parameters: float, ranks: int) -> tuple[float, float]:
    return held_without_masters(stage, parameters, ranks), sent(stage, parameters, ranks)


def shards_all_at_once(stage: int, parameters: float, ranks: int) -> tuple[float, float]:
    return held(3 if stage else 0, parameters, ranks), sent(stage, parameters, ranks)


def stage_3_for_free(stage: int, parameters: float, ranks: int) -> tuple[float, float]:
    return held(stage, parameters, ranks), sent(2, parameters, ranks)


def sends_its_own_part_too(stage: int, parameters: float, ranks: int) -> tuple[float, float]:
    return held(stage, parameters, ranks), sent(stage, parameters, ranks) * ranks / (ranks - 1)


def in_float32(stage: int, parameters: float, ranks: int) -> tuple[float, float]:
    return held_in_float32(stage, parameters, ranks), sent(stage, parameters, ranks)


def sends_bytes(stage: int, parameters: float, ranks: int) -> tuple[float, float]:
    return held(stage, parameters, ranks), 2 * sent(stage, parameters, ranks)


def only_one_half(stage: int, parameters: float, ranks: int) -> tuple[float, float]:
    return held(stage, parameters, ranks), parameters * (ranks - 1) / ranks * (3 if stage == 3 else 1)


def all_reduces_in_stage_3(stage: int, parameters: float, ranks: int) -> tuple[float, float]:
    return held(stage, parameters, ranks), sent(stage, parameters, ranks) * (4 / 3 if stage == 3 else 1)


register(
    Exercise(
        id="zero-costs",
        lesson="11",
        title=_("What a stage holds and sends"),
        dots=1,
        minutes=8,
        answer="costs",
        hints=(
            _("2 bytes for a parameter, 2 for its gradient, 12 for the optimizer. Which of them does the stage shard?"),
            _("Stages 0, 1, 2: a reduce-scatter and an all-gather, P (N - 1) / N elements each."),
            _("Stage 3: parameters are gathered twice, gradients reduced once."),
        ),
        properties=(
            Property("memory", _("bytes that a rank holds, in mixed precision with Adam"), _memory),
            Property("bytes", _("elements that a rank sends in a step"), _traffic),
        ),
        trials=(Trial(_("four stages, two models"), drive=all_costs),),
        wrong_answers=(
            WrongAnswer("no float32 copy", without_masters, "memory", "float32 copy"),
            WrongAnswer("shards all at once", shards_all_at_once, "memory", "only stage 3 shards everything"),
            WrongAnswer("stage 3 for free", stage_3_for_free, "bytes", "once more in backward"),
            WrongAnswer("counts float32", in_float32, "memory", "bytes of float32"),
            WrongAnswer("answers in bytes", sends_bytes, "bytes", "are these bytes"),
            WrongAnswer("one half of the messages", only_one_half, "bytes", "one half"),
            WrongAnswer("all-reduces in stage 3", all_reduces_in_stage_3, "bytes", "one reduce-scatter"),
            WrongAnswer("sends its own part too", sends_its_own_part_too, "bytes", "(N - 1) / N"),
        ),
    )
)  # fmt: skip


# --- three layers that save nothing ---

LAYERS = ("ash", "birch", "cedar")

#: why a sharded layer may save nothing, and how it would show in what the ledger counts
REASONS = {
    "never frees": _("then the count would grow with the first forward under no_grad: look at what held_by counts"),
    "its shard is a view of the whole": _("then a whole matrix would be there before the first forward already"),
    "backward holds the whole": _("then no whole matrix would be there before forward nor after one without gradients, "
                                  "but one between a forward that records and its backward"),
    "gathers twice": _("then twice the bytes would be sent, and memory would be saved all the same"),
    "never gathers": _("then nothing would be sent, and the output would be wrong"),
}  # fmt: skip
RIGHT = {
    "ash": "never frees",
    "birch": "its shard is a view of the whole",
    "cedar": "backward holds the whole",
}


def named(function: Callable[..., Any]) -> dict[str, str]:
    """The answer: for each layer one of the reasons."""
    given = function()
    wanted = _("a dict with a reason for each of {layers}").format(layers=", ".join(LAYERS))
    if not isinstance(given, Mapping):
        raise Nonsense(describe(given), wanted)
    for name in LAYERS:
        if name not in given:
            raise Nonsense(_("a dict without {name}").format(name=name), wanted)
        if given[name] not in REASONS:
            choices = _("one of: {reasons}").format(reasons=", ".join(REASONS))
            raise Nonsense(_("for {name}: {what}").format(name=name, what=describe(given[name])), choices)
    return {name: str(given[name]) for name in LAYERS}


def _judge(name: str) -> Callable[[Outcome], Finding]:
    def judge(outcome: Outcome) -> Finding:
        said = outcome.values[0][name]
        if said == RIGHT[name]:
            return Finding(True)
        wanted = _("the reason that explains when {name} is small and when it is not").format(name=name)
        return Finding(False, wanted, said, _(REASONS[said]))

    return judge


def none_of_them_frees() -> dict[str, str]:
    return dict.fromkeys(LAYERS, "never frees")


def ash_is_held_by_backward() -> dict[str, str]:
    return {**RIGHT, "ash": "backward holds the whole"}


def cedar_gathers_twice() -> dict[str, str]:
    return {**RIGHT, "cedar": "gathers twice"}


def birch_never_gathers() -> dict[str, str]:
    return {**RIGHT, "birch": "never gathers"}


register(
    Exercise(
        id="saves-nothing",
        lesson="11",
        title=_("Sharded layers that save nothing"),
        dots=2,
        minutes=12,
        answer="reasons",
        hints=(
            _("`held_by(layer)` counts when it is new, after a forward under `no_grad`, and after one that records."),
            _("A storage lives as long as one tensor looks at it, however small its part is."),
            _("Who needs the matrix between forward and backward? `x @ whole.T` saves it to compute the gradient of "
              "its input."),
        ),
        properties=tuple(
            Property(name, _("the reason for {name}").format(name=name.capitalize()), _judge(name)) for name in LAYERS
        ),
        trials=(Trial(_("three layers"), drive=named),),
        wrong_answers=(
            WrongAnswer("none of them frees", none_of_them_frees, "birch", "grow with the first forward"),
            WrongAnswer("ash is held by backward", ash_is_held_by_backward, "ash", "between"),
            WrongAnswer("cedar gathers twice", cedar_gathers_twice, "cedar", "twice the bytes"),
            WrongAnswer("birch never gathers", birch_never_gathers, "birch", "output would be wrong"),
        ),
    )
)  # fmt: skip
