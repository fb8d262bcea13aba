"""Distinguish a refusal of the configuration from a fault of the program: both are ValueErrors."""

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
    """Tell whether a `raise` of this package or of a user's file made the error, whose text then says what to change.

    The text of an error from a library or from C code (numpy, `int`) does not help a user; its traceback does.
    """
    place = error.__traceback__
    if place is None:
        return True
    while place.tb_next is not None:
        place = place.tb_next
    code = place.tb_frame.f_code
    ours = code.co_filename.startswith(_PACKAGE) or not code.co_filename.startswith((*_INSTALLED, "<frozen"))
    return ours and code.co_code[place.tb_lasti] in _RAISES
