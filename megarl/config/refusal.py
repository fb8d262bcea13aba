"""Tells what a run refuses from a fault of the program: both are ValueErrors."""

from __future__ import annotations

import dis
import os
import sysconfig

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_INSTALLED = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_RAISES = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE")}


def is_refusal(error: ValueError) -> bool:
    """Whether a `raise` of ours, or of a user's file, made the error: its text then says what to change.

    One that a library made, or a call of C code (numpy's, say, or `int`), says nothing to a user: its traceback does.
    """
    place = error.__traceback__
    if place is None:
        return True
    while place.tb_next is not None:
        place = place.tb_next
    code = place.tb_frame.f_code
    ours = code.co_filename.startswith(_PACKAGE) or not code.co_filename.startswith((*_INSTALLED, "<frozen"))
    return ours and code.co_code[place.tb_lasti] in _RAISES
