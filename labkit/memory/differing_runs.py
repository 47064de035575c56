"""Which operation was it? Names for the message that a recomputation differs from forward."""

import functools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_OURS, _TORCHS = str(Path(__file__).parent), str(Path(torch.__file__).parent)


class CheckpointError(RuntimeError):
    """A recomputation is not what forward was; the message names function and operation."""


def describe_function(function: Callable[..., Any]) -> str:
    """A name for the checkpointed function."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        return f"the module {type(function).__name__}"
    owner: Any = getattr(function, "__self__", None)
    if owner is not None and hasattr(owner, "described"):
        return str(owner.described)
    if isinstance(owner, nn.Module):
        return f"the module {type(owner).__name__}"
    return f"the function {getattr(function, '__name__', type(function).__name__)}"


def describe_operation() -> str:
    """The operation that is running, as its source writes it, and where a user's code called it.

    Autograd's hooks run within the operation, so it is the innermost call outside of this folder.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return "an operation"
    text, place = _source(frame) or frame.f_code.co_name, _place(frame)
    user = frame
    while user.f_back is not None and user.f_code.co_filename.startswith(_TORCHS):
        user = user.f_back
    if user is not frame and not user.f_code.co_filename.startswith(_OURS):
        place = f"{place}, called from {_place(user)}"
    return f"`{text}` ({place})"


def _place(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return f"{'the cell' if 'ipykernel' in name else Path(name).name}, line {frame.f_lineno}"


def _source(frame: FrameType) -> str:
    """The part of the line that is being executed, where it is known."""
    positions = list(frame.f_code.co_positions())
    line, end, begin_column, end_column = positions[frame.f_lasti // 2]
    if line is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, line, frame.f_globals)
    if line == end and begin_column is not None and end_column is not None:
        return text.encode()[begin_column:end_column].decode()
    first = text.encode()[begin_column or 0 :].decode().strip()
    return f"{first.partition('(')[0]}(...)"
