"""Checkpointing by an autograd function: the whole call is one node of the graph, which keeps its inputs.

Forward runs without recording. Backward runs the function again, recording, and then calls backward on what came out:
a backward within backward, hence "reentrant". It is the older form and the simpler one. It knows only what goes in and
out, so `autograd.grad` and higher derivatives are beyond it, and its recomputation always runs to the end.

Source: T. Chen and others, Training Deep Nets with Sublinear Memory Cost (2016), arXiv:1604.06174, algorithm 1 and
section 4.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from labkit.memory.differing_runs import CheckpointError, describe_function
from labkit.memory.surroundings import Surroundings
from labkit.record import span


class Call:
    """A function with arguments whose tensors come apart: `call(tensors)` puts them in their places."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function = function
        self.leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        # a tensor that is given twice comes apart once, and is one and the same when it is put back
        places: dict[int, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                places.setdefault(id(leaf), []).append(place)
        self.places = list(places.values())
        self.tensors = tuple(self.leaves[each[0]] for each in self.places)
        for place in (place for each in self.places for place in each):
            self.leaves[place] = None

    def __call__(self, tensors: Any) -> Any:
        leaves = list(self.leaves)
        for places, tensor in zip(self.places, tensors, strict=True):
            for place in places:
                leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


class Recomputing(torch.autograd.Function):
    """One node for the whole call. The first input is a tensor that needs a gradient, so that the parameters within
    get theirs even where no argument needs one."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, call: Call, surroundings: Surroundings, result: list[Any], *tensors: Any
    ) -> Any:
        ctx.call, ctx.surroundings = call, surroundings
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        with surroundings.of_first_run(call.function):
            leaves, spec = tree_flatten(call(tensors))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ctx.shapes = [output.shape for output in outputs]
        result += [spec, leaves]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "checkpoint with use_reentrant=True works with backward() without `inputs` only, not with "
                "autograd.grad: pass use_reentrant=False."
            )
        tensors = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with span("recomputation", "checkpoint"), torch.enable_grad(), ctx.surroundings.set_back():
            leaves, _ = tree_flatten(ctx.call(tensors))
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = [output.shape for output in outputs]
        if shapes != ctx.shapes:
            was, now = ([list(shape) for shape in each] for each in (ctx.shapes, shapes))
            raise CheckpointError(
                f"checkpoint: {describe_function(ctx.call.function)} is not the same twice: its recomputation gives "
                f"outputs of shapes {now}, and forward gave {was}; with use_reentrant=False the operation is named."
            )
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return None, None, None, None, *(tensor.grad for tensor in tensors)


def recompute_as_function(function: Callable[..., Any], args: Any, kwargs: Any, *, preserve_rng_state: bool) -> Any:
    """Call `function`, keeping nothing but the tensors among its arguments."""
    call = Call(function, args, kwargs)
    surroundings = Surroundings([*call.leaves, *call.tensors], preserve_rng_state=preserve_rng_state)
    anchor = torch.empty(0, requires_grad=True)
    result: list[Any] = []
    tensors, call.tensors = call.tensors, ()
    outputs = iter(Recomputing.apply(anchor, call, surroundings, result, *tensors))
    spec, leaves = result
    return tree_unflatten([next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
