"""Boxes, arrows and text as SVG, for light and dark: lines take the page's colour, surfaces are translucent."""

from __future__ import annotations

from html import escape
from typing import Literal

BLUE, GREEN, ORANGE, RED, VIOLET, GREY = "#3b82f6", "#22a565", "#e8890c", "#e5484d", "#8b5cf6", "#8a8f98"


class Drawing:
    """Shapes from the top left corner, in pixels."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str = "", *, dashed: bool = False) -> None:
        """A rectangle, filled with a colour that the page shines through."""
        filled = f'fill="{colour}" fill-opacity="0.28" stroke="{colour}"'
        fill = filled if colour else 'fill="none" stroke="currentColor"'
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" stroke-width="1.5" {fill}{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 14,
        anchor: Literal["start", "middle", "end"] = "middle",
        bold: bool = False,
        faint: bool = False,
    ) -> None:
        """One line of text on the baseline y."""
        weight = ' font-weight="bold"' if bold else ""
        style = weight + (' fill-opacity="0.75"' if faint else "")
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self._shapes.append(f"<text {place}{style}>{escape(words)}</text>")

    def arrow(self, points: list[tuple[float, float]], colour: str = "currentColor", *, dashed: bool = False) -> None:
        """A line through points, with a head at the last one."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        through = " ".join(f"{x:g},{y:g}" for x, y in points)
        line = f'<polyline points="{through}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        self._shapes.append(line + _head(points, colour))

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        """A thin line."""
        dash = ' stroke-dasharray="3 4"' if dashed else ""
        self._shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="currentColor" stroke-opacity="0.6"{dash}/>'
        )

    def svg(self) -> str:
        """The file."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Roboto, Helvetica, Arial, sans-serif" fill="currentColor">'
        )
        return "\n".join([head, *self._shapes, "</svg>", ""])


def _head(points: list[tuple[float, float]], colour: str) -> str:
    """A triangle at the end of the last piece."""
    (x1, y1), (x, y) = points[-2:]
    length = max(((x - x1) ** 2 + (y - y1) ** 2) ** 0.5, 1e-9)
    dx, dy = (x - x1) / length, (y - y1) / length
    corners = [(x, y), (x - 9 * dx - 5 * dy, y - 9 * dy + 5 * dx), (x - 9 * dx + 5 * dy, y - 9 * dy - 5 * dx)]
    return f'<polygon points="{" ".join(f"{a:.4g},{b:.4g}" for a, b in corners)}" fill="{colour}"/>'
