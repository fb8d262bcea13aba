"""What requests to the endpoint of agents may say, from the code's own table."""

from __future__ import annotations

from megarl.environments.parameters import CHAT, RESPONSES
from megarl_docs.tables import code, plain, table

OF = {"chat": CHAT, "responses": RESPONSES}


def parameters(of: str) -> str:
    """A row for each parameter; those with the same fate and words share one."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, parameter in sorted(OF[of].items(), key=lambda item: item[1].fate):
        rows.setdefault((parameter.fate, parameter.says), []).append(code(name))
    return table(["parameter", "", ""], [[", ".join(names), fate, plain(says)] for (fate, says), names in rows.items()])
