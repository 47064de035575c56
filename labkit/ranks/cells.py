"""Running the source of a `%%ranks` cell in a rank: names persist, the last expression is the cell's value."""

import ast
import linecache
import sys
import types
from typing import Any

import torch
import torch.distributed as dist


def new_namespace(rank: int, world_size: int) -> dict[str, Any]:
    """The names that a rank's cells start with: rank, world_size, torch, dist. The module is `__main__` there."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__.update(rank=rank, world_size=world_size, torch=torch, dist=dist)
    return module.__dict__


def run(code: str, number: int, namespace: dict[str, Any]) -> str | None:
    """Execute a cell; returns the repr of its last expression, None where there is none or it is None."""
    name = f"<ranks cell {number}>"
    lines = code.splitlines(keepends=True)
    linecache.cache[name] = (len(code), None, lines, name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
    return None if value is None or code.rstrip().endswith(";") else repr(value)


def look_up(name: str, namespace: dict[str, Any]) -> Any:
    """The value of a name in the rank's cells."""
    if name not in namespace:
        raise NameError(f"name {name!r} is not defined on this rank: define it in a %%ranks cell, or push it")
    return namespace[name]
