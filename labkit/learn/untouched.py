"""Telling the stub that a lesson gives from an attempt, by what its code does rather than by its text."""

import dis
from types import CodeType, TracebackType
from typing import Any

_SILENT = {"RESUME", "NOP", "CACHE", "PRECALL", "PUSH_NULL", "COPY_FREE_VARS", "MAKE_CELL"}
_RETURNS_NOTHING = (["LOAD_CONST", "RETURN_VALUE"], ["RETURN_CONST"])


def is_untouched(function: Any) -> bool:
    """Whether a function does nothing but return None or raise NotImplementedError."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or code.co_flags & 0x2A0:  # generators and coroutines do something else
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
    names = [step.opname for step in steps]
    if names in _RETURNS_NOTHING:
        return steps[0].argval is None
    only_constants = not any(name.startswith(("LOAD_FAST", "STORE", "LOAD_DEREF")) for name in names)
    return names[-1:] == ["RAISE_VARARGS"] and code.co_names == ("NotImplementedError",) and only_constants


def raised_by_statement(tb: TracebackType | None) -> bool:
    """Whether an exception came from a raise statement: operations that torch lacks raise NotImplementedError too."""
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and tb.tb_frame.f_code.co_code[tb.tb_lasti] == dis.opmap["RAISE_VARARGS"]
