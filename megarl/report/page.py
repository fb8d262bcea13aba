"""Builds the page: one HTML file with style, script and, unless the page is live, the blocks."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files

import megarl
from megarl.phases import Phase
from megarl.report.blocks import Block, now

PHASE_COLORS: Mapping[str, str] = {  # in the order of a step; "other": time in no phase
    Phase.OFFLOAD: "#ff8ab7",
    Phase.RESHARD: "#ff725c",
    Phase.GENERATE: "#4269d0",
    Phase.REWARD: "#efb118",
    Phase.LOG_PROBS: "#6cc5b0",
    Phase.REF: "#97bbf5",
    Phase.TEACHER: "#b3cde3",
    Phase.VALUES: "#f7c6a3",
    Phase.UPDATE_CRITIC: "#8cc26a",
    Phase.UPDATE: "#3ca951",
    Phase.VALIDATE: "#a463f2",
    Phase.SAVE: "#9c6b4e",
    "other": "#c4c4c4",
}

_SCRIPTS = ("data.js", "dom.js", "chart.js", "curves.js", "rollouts.js", "tokens.js", "timeline.js", "memory.js",
            "settings.js", "app.js")  # fmt: skip


def page(blocks: Mapping[str, Block] | None) -> str:
    """Build the page.

    The browser runs only this page's script, whose digest is in the page's policy: a script in a response cannot run,
    even if a mistake of the page turned the response into markup.

    Args:
        blocks: the blocks to show; None: the page asks its server for them.
    """
    colors = f"const PHASE_COLORS = {json.dumps({str(phase): color for phase, color in PHASE_COLORS.items()})};"
    script = "\n".join([colors, *(_asset(name) for name in _SCRIPTS)])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'none'" if blocks is not None else "'self'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    embedded = "".join(
        f'<script type="application/gzip;base64" id="block-{html.escape(name)}">'
        f"{base64.b64encode(block.data).decode()}</script>\n"
        for name, block in (blocks or {}).items()
    )
    origin = f"live, megarl {megarl.__version__}" if blocks is None else f"{now()}, megarl {megarl.__version__}"
    parts = {
        "policy": policy,
        "live": "true" if blocks is None else "false",
        "made": html.escape(origin),
        "style": _asset("style.css"),
        "blocks": embedded,
        "script": script,
    }
    text = _asset("page.html")
    for name, part in parts.items():
        before, mark, after = text.partition(f"<!--{name}-->")
        assert mark, name
        text = before + part + after
    return text


def _asset(name: str) -> str:
    return (files("megarl.report") / "assets" / name).read_text(encoding="utf-8")
