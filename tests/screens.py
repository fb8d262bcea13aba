"""Pages in a browser, on screens of any size."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_LACKING = next((f"needs {name}" for name in ("chromium", "chromedriver") if shutil.which(name) is None), "")
needs_chromium = pytest.mark.skipif(bool(_LACKING), reason=_LACKING)

_OUTSIDE = """
const [closed] = arguments, found = [];
const within = ({ left, right }) => left >= -1 && right <= innerWidth + 1;
const inScrolledBox = (element) => {
  for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(box).overflowX) && box.scrollWidth > box.clientWidth)
      return within(box.getBoundingClientRect());
  return false;
};
if (document.documentElement.scrollWidth > innerWidth) found.push("the page itself");
for (const element of document.querySelectorAll("a, button, input, select, summary, label, [role=button]")) {
  const box = element.getBoundingClientRect();
  const seen = box.width && box.height && element.checkVisibility({ visibilityProperty: true });
  if (seen && !(closed && element.closest(closed)) && !within(box) && !inScrolledBox(element))
    found.push(element.outerHTML.slice(0, 200));
}
return found;
"""


@contextlib.contextmanager
def screen(browser: Any, width: int, height: int) -> Iterator[None]:
    """The browser with a screen of so many pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def outside(browser: Any, *, closed: str = "") -> list[str]:
    """What of the open page lies beside the screen: the page, if it scrolls sideways, and what can be clicked.

    What a box of its own scrolls into view is in view. Panels that the selector `closed` names are not looked at.
    """
    return list(browser.execute_script(_OUTSIDE, closed))
