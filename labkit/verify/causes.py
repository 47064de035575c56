"""From a difference to its likely cause: which known mistake gives just these numbers."""

from collections.abc import Callable, Sequence

import torch

from labkit.verify.courses import default_dtype, made
from labkit.verify.differences import Difference
from labkit.verify.failure import Cause, Failure
from labkit.verify.gradient_causes import of_gradients
from labkit.verify.nearness import near, same
from labkit.verify.swapped_shards import swapped_shards
from labkit.verify.truth import run_truth


def likely_cause(failure: Failure) -> Cause | None:
    """The first known mistake that explains the earliest difference, None where none does."""
    looks: dict[str, Callable[[Failure], Cause | None]] = {
        "start": _of_start,
        "start_buffers": _of_start_buffers,
        "first_gradients": of_gradients,
        "first_weights": _of_weights,
        "gradients": _of_later_gradients,
        "weights": _of_weights,
        "buffers": _of_buffers,
    }
    with torch.random.fork_rng(devices=[]), default_dtype(failure.task.dtype):
        try:
            return _of_names(failure.first) or looks[failure.kind](failure) or _of_reference(failure)
        except Exception:  # the model may not bear the splits that are tried: the difference is what must be told
            return _of_reference(failure)


def _of_names(bad: Sequence[Difference]) -> Cause | None:
    for one in bad:
        if one.note == "missing":
            sentence = f"no rank shows {one.name!r}: full_params() and full_grads() give every original name"
            return Cause("missing", sentence)
        if one.note == "is not a number":
            return Cause("not a number", f"{one.name!r} is not a number: look for a division by a weight of zero")
        if "shape" in one.note:
            return Cause("wrong shape", f"{one.name!r} {one.note}: is it a shard, shown without being gathered?")
    return None


def _of_reference(failure: Failure) -> Cause | None:
    """A whole batch in one process is no truth where the model looks at its share as a whole, or draws masks."""
    if failure.reference == "replay" or failure.task.world_size == 1:
        return None
    for name, module in made(failure.task.build, failure.task.dtype, failure.task.seed).named_modules():
        kind = type(module).__name__
        if ("BatchNorm" in kind and "Sync" not in kind) or ("Dropout" in kind and getattr(module, "p", False)):
            sentence = f"{name or 'the model'} is a {kind}, whose result depends on the split: give reference='replay'"
            return Cause("reference", sentence)
    return None


def _of_start(failure: Failure) -> Cause | None:
    if 0 in failure.bad_ranks:
        other = Cause("other start", "parallelize() changes the weights that build() gave")
        return swapped_shards(failure) or other
    sentence = f"the weights of {failure.told_ranks} at the start are not rank 0's: broadcast them at construction"
    return Cause("not broadcast", sentence)


def _of_start_buffers(failure: Failure) -> Cause | None:
    if 0 in failure.bad_ranks:
        return Cause("other start", "parallelize() changes the buffers that build() gave")
    sentence = f"the buffers of {failure.told_ranks} at the start are not rank 0's: broadcast them at construction"
    return Cause("not broadcast", sentence)


def _of_later_gradients(failure: Failure) -> Cause | None:
    never_zeroed, _ = run_truth(failure.task, failure.reference, zero=False)
    if all(near(failure.ours(rank, name), never_zeroed.gradients[name]) for rank, name in failure.pairs):
        return Cause("not zeroed", "gradients add up from step to step: zero_grad is missing")
    return None


def _of_weights(failure: Failure) -> Cause | None:
    """The gradients are right, so that it is the step."""
    start, names = failure.truth.start, [one.name for one in failure.first]
    if all(same(failure.ours(rank, name), start[name]) for rank, name in failure.pairs):
        return Cause("no step", "these weights are still those of the start: the optimizer does not step them")
    if all(same(failure.true(name), start[name]) for name in names):
        return Cause("frozen", f"{names[0]} must not change: it is frozen or has no gradient, and yet it was stepped")
    if len(failure.bad_ranks) < failure.task.world_size:
        sentence = f"the gradients are right but the weights of {failure.told_ranks} are not: another optimizer there?"
        return swapped_shards(failure) or Cause("ranks disagree", sentence)
    sentence = "the gradients are right but the step is not: look at the optimizer's state and settings"
    return swapped_shards(failure) or Cause("optimizer", sentence)


def _of_buffers(failure: Failure) -> Cause | None:
    if 0 not in failure.bad_ranks:
        sentence = f"the buffers of {failure.told_ranks} are not synchronised: take rank 0's before each step"
        return Cause("buffers not synchronised", sentence)
    counters = [one for one in failure.first if one.name.endswith("num_batches_tracked") and one.ratio is not None]
    if counters and counters[0].ratio not in (None, 1.0):
        sentence = f"the buffers are updated {counters[0].ratio:g} times as often as the truth's"
        return Cause("buffers updated too often", sentence)
    return Cause("buffers", "the buffers differ from the truth: is each share seen once, in training mode?")
