"""One runtime for every schedule: it goes through this rank's list and does what each action says."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from labkit.collectives.groups import Endpoint
from labkit.parallel.pipeline.action_lists import Schedule
from labkit.parallel.pipeline.actions import Action
from labkit.parallel.pipeline.announcing import digest
from labkit.parallel.pipeline.buffers import Buffers
from labkit.parallel.pipeline.links import CONTROL_TAG, Begun, Links, incoming, receiver
from labkit.parallel.pipeline.losses import Losses
from labkit.parallel.pipeline.shapes import Shape, as_tensors, receive_shapes, send_shapes, shapes_of
from labkit.parallel.pipeline.split_backward import backward_for_inputs
from labkit.parallel.pipeline.stage import PipelineStage
from labkit.record import span


class Plan:
    """A schedule as this rank sees it, worked out once."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.owners = schedule, schedule.owners
        self.row = schedule.rows[rank]
        self.expected = incoming(schedule, rank)
        self.sends_to = {
            action: place for action in self.row if (place := receiver(action, self.owners)) not in (None, rank)
        }
        self.splits = schedule.splits_backward
        self.number = digest(schedule.rows)


class _Alive(NamedTuple):
    """What is kept of a micro-batch between its forward and its backward: the graph, and the inputs' leaves."""

    inputs: tuple[Tensor, ...]
    roots: tuple[Any, ...]


class Execution:
    """One step on this rank.

    Args:
        stages: those on this rank, by index.
        plan: the lists.
        end: the pipeline's group.
        sizes: the rows of each micro-batch.
        shapes: what stages pass on, by (stage, rows); kept from step to step.
        buffers: for what arrives; kept from step to step.
        thread: begins to send large messages.
        batch: for each micro-batch the first stage's arguments, all stages' keyword arguments, and the targets.
        losses: None where none is wanted.
        training: whether backward follows.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        plan: Plan,
        end: Endpoint,
        sizes: list[int],
        shapes: dict[tuple[int, int], tuple[Shape, ...]],
        buffers: Buffers,
        thread: ThreadPoolExecutor,
        batch: tuple[list[Any], list[Any], list[Any]],
        losses: Losses | None,
        *,
        training: bool,
        keep_outputs: bool,
    ) -> None:
        self.stages, self.plan, self.end, self.sizes, self.shapes = stages, plan, end, sizes, shapes
        self.arguments, self.keywords, self.targets = batch
        self.losses, self.training, self.keep_outputs = losses, training, keep_outputs
        self.alive: dict[tuple[int, int], _Alive] = {}
        self.waiting_weights: dict[tuple[int, int], Callable[[], None]] = {}
        self.handed: dict[Action, tuple[Tensor, ...]] = {}  # between stages of this rank
        self.outputs: list[Any] = []
        self.links = Links(end, plan.expected, buffers, thread, self._known_shapes, self._asked_shapes)
        self.does = {"F": self._forward, "B": self._backward, "I": self._backward_inputs, "W": self._backward_weights}

    def run(self) -> None:
        """The whole list; returns when all messages of this rank have left."""
        self.links.post_ahead()
        for action in self.plan.row:
            try:
                self.does[action.kind](action)
            except Exception as error:
                error.add_note(f"in the pipeline's {action.words}")
                if action.kind == "F" and "used in an in-place operation" in str(error):
                    raise RuntimeError(
                        f"pipeline: stage {action.stage} changes in place what it was given, which backward starts "
                        "from: build its first layer with inplace=False, or cut elsewhere"
                    ) from error
                raise
        self.links.finish()

    # --- the four kinds of action ---

    def _forward(self, action: Action) -> None:
        stage, number = self.stages[action.stage], action.micro_batch
        if stage.is_first:
            inputs = self.arguments[number]
        else:
            inputs = self._take(Action("F", number, action.stage - 1))
            if self.training:
                kinds = self.shapes[action.stage - 1, self.sizes[number]]
                inputs = tuple(one.requires_grad_(kind.differentiated) for one, kind in zip(inputs, kinds, strict=True))
        with span(str(action), "forward", stage=action.stage, micro_batch=number):
            output = stage.forward(inputs, self.keywords[number], training=self.training)
            roots: tuple[Any, ...] = ()
            if stage.is_last:
                if self.losses is not None:
                    loss = self.losses.of(output, self.targets[number])
                    roots = (loss,) if loss.requires_grad else ()
                    if self.training and not roots:
                        self.losses.refuse_detached(output)
                if self.keep_outputs:
                    self.outputs.append(_detached(output))
            else:
                tensors = as_tensors(output, action.stage)
                self._pass_on(action, tensors)
                roots = tuple(get_gradient_edge(one) for one in tensors if one.requires_grad) if self.training else ()
        if self.training:
            leaves = () if stage.is_first else tuple(one for one in inputs if one.requires_grad)
            self.alive[action.stage, number] = _Alive(leaves, roots)

    def _backward(self, action: Action) -> None:
        alive, grads = self._arrived(action)
        with span(str(action), "backward", stage=action.stage, micro_batch=action.micro_batch):
            if alive.roots:
                torch.autograd.backward(alive.roots, grads)
            del grads
            self._pass_back(action, [one.grad for one in alive.inputs], alive.inputs)

    def _backward_inputs(self, action: Action) -> None:
        alive, grads = self._arrived(action)
        key = (action.stage, action.micro_batch)
        with span(str(action), "backward", stage=action.stage, micro_batch=action.micro_batch):
            if alive.roots:
                found, self.waiting_weights[key] = backward_for_inputs(alive.roots, grads, alive.inputs)
            else:
                found = []
            self._pass_back(action, found, alive.inputs)

    def _backward_weights(self, action: Action) -> None:
        weights = self.waiting_weights.pop((action.stage, action.micro_batch), None)
        with span(str(action), "backward", stage=action.stage, micro_batch=action.micro_batch):
            if weights is not None:
                weights()

    # --- what they share ---

    def _arrived(self, action: Action) -> tuple[_Alive, list[Tensor]]:
        """What the forward has left, and the gradients to start from."""
        stage, number = self.stages[action.stage], action.micro_batch
        alive = self.alive.pop((action.stage, number))
        if stage.is_last:
            assert self.losses is not None
            factor = self.losses.factors[number]
            return alive, [torch.full_like(root, factor) for root in alive.roots]
        kind = "I" if (action.stage + 1, number) in self.plan.splits else "B"
        return alive, list(self._take(Action(kind, number, action.stage + 1)))

    def _take(self, made_by: Action) -> tuple[Tensor, ...]:
        if made_by in self.handed:
            return self.handed.pop(made_by)
        return tuple(self.links.take(made_by))

    def _pass_on(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        key = (action.stage, self.sizes[action.micro_batch])
        shapes, place = shapes_of(tensors), self.plan.sends_to.get(action)
        known = self.shapes.get(key)
        if known is None:
            self.shapes[key] = shapes
            if place is not None:
                self.links.sends += map(Begun, send_shapes(self.end, shapes, place, CONTROL_TAG))
        elif known != shapes:
            before, now = (", ".join(map(str, some)) for some in (known, shapes))
            raise RuntimeError(
                f"pipeline: stage {action.stage} returned first {before}, then {now} for inputs of the same shapes: "
                "what it returns must follow from the shapes of the batch"
            )
        if place is None:
            self.handed[action] = tuple(one.detach() for one in tensors)
        else:
            self.links.send(tensors, place)

    def _pass_back(self, action: Action, found: list[Tensor | None], inputs: tuple[Tensor, ...]) -> None:
        """An input that nothing depends on has a gradient of zeros."""
        pairs = zip(found, inputs, strict=False) if found else ((None, one) for one in inputs)
        grads = tuple(torch.zeros_like(one) if grad is None else grad for grad, one in pairs)
        place = self.plan.sends_to.get(action)
        if place is not None:
            self.links.send(grads, place)
        elif action.stage:
            self.handed[action] = tuple(grads)

    # --- shapes ---

    def _known_shapes(self, action: Action) -> tuple[Shape, ...] | None:
        """Of an activation those of the stage before; of a gradient those of this rank's own output."""
        stage = action.stage if action.kind == "F" else action.stage - 1
        shapes = self.shapes.get((stage, self.sizes[action.micro_batch]))
        if shapes is None or action.kind == "F":
            return shapes
        return tuple(one for one in shapes if one.differentiated)

    def _asked_shapes(self, action: Action) -> tuple[Shape, ...]:
        """A gradient's are known by now, since its forward came first."""
        shapes = receive_shapes(self.end, self.links.places[action], CONTROL_TAG)
        self.shapes[action.stage, self.sizes[action.micro_batch]] = shapes
        return shapes


def _detached(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, tuple | list):
        return type(output)(_detached(one) for one in output)
    if isinstance(output, dict):
        return {key: _detached(one) for key, one in output.items()}
    return output
