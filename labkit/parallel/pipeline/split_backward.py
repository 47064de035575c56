"""A backward in two parts: for a stage's inputs at once, for its weights whenever there is time.

The first part runs backward to the inputs only, which autograd does without computing any weight's gradient. On its way
it keeps the gradients that arrive at the nodes where weights branch off; the second part goes on from these nodes, into
the weights alone. So nothing is computed twice.

Source of the idea: P. Qi and others, Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Grads = Sequence[Tensor | None]


def backward_for_inputs(
    roots: Sequence[Any], grads: Grads, inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Callable[[], None]]:
    """The gradients of `inputs`, and a function that adds the weights' gradients to them, to be called once.

    `roots` are tensors or gradient edges, `grads` their gradients (None for a scalar). With no inputs all of it is left
    to the second part.
    """

    def everything() -> None:
        torch.autograd.backward(roots, grads)

    if not inputs:
        return [], everything
    tops = [_node(root) for root in roots]
    on_the_way, order = _nodes_towards({_node(one) for one in inputs}, tops)
    branches = _branches(on_the_way, order)
    leaves = [leaf for _, reached in branches for leaf in reached]
    kept: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [node.register_prehook(_keeper(kept, node)) for node, _ in branches]
    try:
        found = torch.autograd.grad(roots, list(inputs), grads, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    if len(set(leaves)) < len(leaves) or _reaches_weights_beside(tops, on_the_way):
        # a weight that is used at two places, or a root that no input has a part in: the simple way is the sure one
        return list(found), lambda: _into_weights(roots, grads, _all_leaves(tops) - {_node(one) for one in inputs})

    def weights() -> None:
        for node, reached in branches:
            edges = [(GradientEdge(node, number), grad) for number, grad in enumerate(kept.get(node, ()))]
            known = [(edge, grad) for edge, grad in edges if grad is not None]
            if known:
                _into_weights([edge for edge, _ in known], [grad for _, grad in known], reached)
        kept.clear()

    return list(found), weights


def _node(root: Any) -> Node:
    edge = root if isinstance(root, GradientEdge) else torch.autograd.graph.get_gradient_edge(root)
    return edge.node


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _nodes_towards(ends: set[Node], tops: Sequence[Node]) -> tuple[set[Node], list[Node]]:
    """The nodes from which one of `ends` is reached, and all nodes, children first."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(node, False) for node in tops]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in _children(node) if child not in seen]
    towards: set[Node] = set()
    for node in order:
        if node in ends or any(child in towards for child in _children(node)):
            towards.add(node)
    return towards, order


def _branches(on_the_way: set[Node], order: Sequence[Node]) -> list[tuple[Node, set[Node]]]:
    """Nodes on the way to the inputs from which weights branch off, each with the weights' nodes."""
    found = []
    for node in order:
        if node in on_the_way:
            aside = [child for child in _children(node) if child not in on_the_way]
            reached = _all_leaves(aside)
            if reached:
                found.append((node, reached))
    return found


def _all_leaves(tops: Sequence[Node]) -> set[Node]:
    """The nodes below in which gradients of leaves add up."""
    leaves, seen, stack = set(), set[Node](), list(tops)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += _children(node)
            if hasattr(node, "variable"):
                leaves.add(node)
    return leaves


def _reaches_weights_beside(tops: Sequence[Node], on_the_way: set[Node]) -> bool:
    return any(node not in on_the_way and _all_leaves([node]) for node in tops)


def _into_weights(roots: Sequence[Any], grads: Grads, leaves: set[Node]) -> None:
    if leaves:
        inputs: list[Any] = [leaf.variable for leaf in leaves]  # type: ignore[attr-defined]
        torch.autograd.backward(roots, grads, retain_graph=True, inputs=inputs)


def _keeper(kept: dict[Node, tuple[Tensor | None, ...]], node: Node) -> Callable[[Any], None]:
    def keep(grads: tuple[Tensor | None, ...]) -> None:
        kept[node] = grads

    return keep
