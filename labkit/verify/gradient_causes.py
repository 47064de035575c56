"""Why gradients differ: they are compared with what each known mistake would give."""

from labkit.verify.courses import made
from labkit.verify.failure import Cause, Failure
from labkit.verify.nearness import near, times
from labkit.verify.suspects import Suspect, sums_by_rank, suspects
from labkit.verify.swapped_shards import swapped_shards
from labkit.verify.truth import Replicas


def of_gradients(failure: Failure) -> Cause | None:
    """The cause of wrong gradients in the first step, where the weights are still right."""
    bad = failure.first
    if all(one.note == "should be None" for one in bad):
        names = ", ".join(dict.fromkeys(one.name for one in bad[:3]))
        return Cause("gradient of an unused parameter", f"{names}: unused or frozen, and yet given a gradient")
    looks = (_no_gradient, _a_factor, _suspect, swapped_shards, _tied)
    return next((cause for look in looks if (cause := look(failure)) is not None), None)


def _no_gradient(failure: Failure) -> Cause | None:
    names = list(dict.fromkeys(one.name for one in failure.first))
    if any(one.note != "is None" and one.ratio != 0.0 for one in failure.first):
        return None
    told = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    return Cause("no gradient", f"no gradient arrives at {told}: is the graph cut, or a message missing?")


def _a_factor(failure: Failure) -> Cause | None:
    """One factor between all that differs and the truth."""
    ratio = failure.first[0].ratio
    if ratio is None or not all(
        near(failure.ours(rank, name), times(failure.true(name), ratio)) for rank, name in failure.pairs
    ):
        return None
    cause, words = _meaning(failure, ratio)
    which = "every gradient" if len(failure.first) > 1 else f"the gradient of {failure.first[0].name}"
    return Cause(cause, f"{which} is {ratio:.4g} times the truth" + (f": {words}" if words else ""))


def _meaning(failure: Failure, ratio: float) -> tuple[str, str]:
    """What the factor stands for: a short name, and words."""
    size, micro = failure.task.world_size, failure.task.micro_batches
    weight = sum(sums_by_rank(failure.task)[1])
    meanings: list[tuple[float, str, str]] = [
        (size, "summed", f"summed over the {size} ranks instead of averaged"),
        (1 / size, "divided twice", f"divided by the {size} ranks once too often"),
        (micro, "micro-batches", f"summed over the {micro} micro-batches: divide each one's loss"),
        (1 / micro, "micro-batches", f"divided by the {micro} micro-batches once too often"),
        (micro * size, "summed", f"summed over the {size} ranks and the {micro} micro-batches"),
        (weight, "weight", f"the loss sum is not divided by the weight, {weight:g} samples or tokens"),
        (weight / size, "weight", f"the loss sum is not divided by the weight, {weight:g} samples or tokens"),
        (weight * size, "weight", f"neither divided by the weight, {weight:g} samples or tokens, nor by the ranks"),
        (1 / weight, "weight", f"divided by the weight, {weight:g} samples or tokens, twice"),
    ]
    found = [(cause, words) for value, cause, words in meanings if value != 1 and abs(ratio / value - 1) < 2e-3]
    whole = round(ratio)
    if micro == 1 and whole not in (0, 1, size) and abs(ratio - whole) < 2e-3 * ratio:
        found.append(("micro-batches", f"summed over {whole} micro-batches, if there are so many"))
    if not found:
        return "a factor", ""
    return found[0][0], "; or ".join(dict.fromkeys(words for _, words in found))


def _suspect(failure: Failure) -> Cause | None:
    """The suspect that explains the most of what differs; it must explain more than half."""
    pairs, best = failure.pairs, None
    most = len(pairs) // 2
    for suspect in suspects(failure.task):
        hits = sum(near(failure.ours(rank, name), suspect.gradients[rank].get(name)) for rank, name in pairs)
        if hits > most:
            most, best = hits, suspect
        if hits == len(pairs):
            break
    if best is None:
        return None
    if best.factor is not None:
        return _averages_parameters(failure, best) or _not_synchronised(failure, best)
    return Cause(best.cause, best.sentence)


def _averages_parameters(failure: Failure, suspect: Suspect) -> Cause | None:
    assert suspect.factor is not None
    for when in ("before", "after"):
        copies = Replicas(failure.task, suspect.factor).train(when)
        pairs = zip(failure.ranks, copies, strict=True)
        if all(near(course.weights.get(name), value) for course, copy in pairs for name, value in copy.items()):
            sentence = "parameters are averaged instead of gradients: every rank steps with its own share's gradient"
            return Cause("averages parameters", sentence)
    return None


def _not_synchronised(failure: Failure, suspect: Suspect) -> Cause:
    wrong = {one.name for one in failure.first}
    trained = [name for name, value in failure.truth.first_gradients.items() if value is not None]
    right = [name for name in trained if name not in wrong]
    some = f" ({len(wrong)} of {len(trained)} parameters; {right[0]} is right)" if right else ""
    return Cause(suspect.cause, suspect.sentence + some)


def _tied(failure: Failure) -> Cause | None:
    module = made(failure.task.build, failure.task.dtype, failure.task.seed)
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        original = first[id(parameter)]
        if original != name and {one.name for one in failure.first} == {original}:
            return Cause("tied weights", f"{original} is tied to {name}: the gradients of both uses must be added")
    return None
