"""State that is no placed tensor: nested dicts, lists, numbers and texts as JSON, with tensors set apart.

And the states of the random generators of a rank in that form.
"""

import random
from typing import Any

import numpy as np
import torch

_TENSOR = "$tensor"


def split(value: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    """`value` as JSON, in which each tensor is replaced by its key in `tensors`, to which it is added. Tuples become
    lists. What JSON can't hold is refused with a TypeError that says where it is."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _TENSOR:
                raise TypeError(f"{path} has the key {key!r}: give strings as keys")
        return {key: split(inner, tensors, f"{path}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [split(inner, tensors, f"{path}.{index}") for index, inner in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{path} is a {type(value).__name__}: give numbers, texts, lists, dicts and tensors")


def join(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that `split` took apart."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: join(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [join(inner, tensors) for inner in value]
    return value


def random_states() -> dict[str, Any]:
    """The states of this rank's generators: torch's (uint8; that of its GPU too, where used), numpy's and Python's."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(words), next_gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put this rank's generators into the states that `random_states` returned."""
    torch.set_rng_state(states["torch"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, words, next_gauss = states["python"]
    random.setstate((version, tuple(words), next_gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
