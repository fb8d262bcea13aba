"""Tells where a name in tests leads: to the program under test, or to Python.

A program that defines `abs` or `math` must not decide what `abs(f(1) - 2) < 1e-6` says.
"""

from __future__ import annotations

import builtins
import sys

_OBJECTS = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple ChainMap",
    "math": "acos asin atan atan2 ceil comb copysign cos cosh degrees dist e erf exp fabs factorial floor fmod frexp "
    "fsum gamma gcd hypot inf isclose isfinite isinf isnan isqrt lcm ldexp log log10 log1p log2 modf nan perm pi prod "
    "radians remainder sin sinh sqrt tan tanh tau trunc",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile "
    "filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
    "functools": "cmp_to_key lru_cache partial reduce wraps",
    "operator": "attrgetter itemgetter methodcaller",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "datetime": "date timedelta timezone",
    "copy": "deepcopy",
    "heapq": "heapify heappop heappush nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort",
    "random": "randint choice shuffle sample",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "typing": "Any Callable Dict Generator Iterable Iterator List Optional Sequence Set Tuple Union",
    "dataclasses": "dataclass",
    "enum": "Enum",
    "io": "StringIO BytesIO",
    "contextlib": "redirect_stdout suppress",
}
OBJECTS = {name: module for module, names in _OBJECTS.items() for name in names.split()}
"""Names that tests often take for granted -> the module that has them."""
_CONSTANTS = "e inf nan pi tau ascii_letters ascii_lowercase ascii_uppercase digits punctuation"
CONSTANTS = set(_CONSTANTS.split())
_ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot", "dt": "datetime"}


def module_of(name: str) -> str | None:
    """Return the module that a name in front of a dot stands for; None: there is no such."""
    if name in _ALIASES:
        return _ALIASES[name]
    return name if name in sys.stdlib_module_names else None


def is_pythons(name: str) -> bool:
    """Tell whether Python itself has a name; tests that also name something else mean Python's by it."""
    return hasattr(builtins, name) or name in OBJECTS or module_of(name) is not None
