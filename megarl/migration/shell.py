"""Reads the commands that a shell script runs, and the values of its variables."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(?!\()(.*)$")
_ARRAY = re.compile(
    r"(?P<before>^|;|&&|\b(?:then|else|do)\b)[ \t]*(?P<name>[A-Za-z_]\w*)(?P<more>\+?)="
    r"\((?P<words>(?:[^()'\"]|'[^']*'|\"[^\"]*\"|\$\(\([^)]*\)\))*)\)",
    re.MULTILINE,
)
_PLACE = "\0"
"""The letter that begins a line in place of an array."""
_DOCUMENT = re.compile(
    r"^[ \t]*read\b[^\n<]*\b(\w+)[ \t]*<<-?[ \t]*(['\"]?)(\w+)\2[ \t]*\n(.*?)\n[ \t]*\3[ \t]*$", re.M | re.S
)
"""Matches `read -r -d '' NAME <<EOF`, a text, and `EOF`."""
_BRANCH = re.compile(r"^\s*(if|elif|else|fi)\b\s*(.*?)\s*(?:;\s*then)?\s*(?:#.*)?$")
_EXPORTED = re.compile(r"(?m)^\s*export\s+(.*)$")
_LONGEST_QUOTATION = 400
"""Lines that a quotation may have."""
_COMMAND = re.compile(r"\$\((?!\()[^()]*\)")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
_BACKQUOTED = re.compile(r"`([^`\n]*)`")
_COMMENT_OVER_LINES = re.compile(r"(?m)(?<=\s)#\s[^\n]*\\$")
"""Matches a comment behind a word that ends in a backslash: the next line is no part of it."""
_ALL_OF = re.compile(r"^\$\{(\w+)\[@\]\}$")
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_REPLACED = re.compile(r"\$\{(\w+)(//?)([^/{}*?\[]+)/([^{}]*)\}")
"""Matches `${NAME//TEXT/OTHER}`, which replaces each TEXT, and `${NAME/TEXT/OTHER}`, the first."""
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_QUOTED = re.compile(r"(?:\s-m\s+\S+|\.py)\s+(?:--\w|[+~]*\w[\w.]*=)")
"""A command in one word, as `bash -c` has it."""
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_MOST = 2**63


def split(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Put the values of variables into words; a variable that stands alone may become several words."""
    result: list[str] = []
    for word in words:
        value = _expanded(word, variables)
        several = VARIABLE.fullmatch(word) or _REPLACED.fullmatch(word) or _QUOTED.search(word)
        result += _words(value) if several else [value]
    return result


def commands_of(text: str) -> tuple[list[list[str]], Mapping[str, str], list[str]]:
    """Split a script into the words of its commands, its variables with those of the environment, and the names that
    got several values where it is not known which branch runs."""
    text = _COMMENT_OVER_LINES.sub(r"\\", re.sub(r"(?m)^\s*#.*$", "", text.replace("\r\n", "\n")))
    text = _BACKQUOTED.sub(lambda match: "" if match[1].startswith("#") else f"$({match[1]})", text)
    text = re.sub(r"\\(?:\n|$)", " ", text)
    text = _DOCUMENT.sub(lambda match: f"{match[1]}={shlex.quote(' '.join(match[4].split()))}", text)
    for pattern in (_ARITHMETIC, _COMMAND):
        text = pattern.sub(lambda match: "".join(match[0].split()), text)
    variables: dict[str, str] = dict(os.environ)
    arrays: dict[str, list[str]] = {}
    array_matches: list[re.Match[str]] = []

    def keep(match: re.Match[str]) -> str:
        array_matches.append(match)
        return f"{match['before']}\n{_PLACE}{len(array_matches) - 1}\n"

    def words_of(line: str) -> list[str]:
        return [element for word in _words(line) for element in _elements(word, arrays)]

    branches = _Branches()
    commands: list[list[str]] = []
    assigned_texts: dict[str, set[str]] = {}
    doubtful: set[str] = set()
    for line in _lines(_ARRAY.sub(keep, text)):
        if branches.is_one(line, variables) or branches.runs is False:
            continue
        if line.startswith(_PLACE):
            array = array_matches[int(line[1:])]
            arrays[array["name"]] = [
                *(arrays.get(array["name"], []) if array["more"] else []),
                *words_of(array["words"]),
            ]
            continue
        if (match := _ASSIGNED.match(line)) and len(assigned := _words(match[3])) <= 1:
            name, value = match[1], assigned[0] if assigned else ""
            if match[2]:
                variables[name] = variables.get(name, "") + _expanded(value, variables)
                continue
            if name not in (use[1] or use[3] for use in VARIABLE.finditer(value)):  # else it is added to
                assigned_texts.setdefault(name, set()).add(value)
            if branches.runs is None:
                doubtful.add(name)
            value = _expanded(value, variables)
            home_match = re.match(r"~(/|$)", value)
            variables[name] = variables.get("HOME", "~") + value[1:] if home_match else value
            continue
        if (words := words_of(line)) and words[0] not in ("echo", "printf"):
            commands.append(words)
    used_names = {match[1] or match[3] for match in VARIABLE.finditer(text)}
    return (
        commands,
        variables,
        [name for name in assigned_texts if len(assigned_texts[name]) > 1 and name in doubtful & used_names],
    )


def _elements(word: str, arrays: Mapping[str, list[str]]) -> list[str]:
    """Replace `${NAME[@]}` by the words of the array; other words stay."""
    array_match = _ALL_OF.match(word)
    return arrays.get(array_match[1], []) if array_match else [word]


def exported(text: str) -> list[str]:
    """List the variables that a script sets for the programs it starts and does not use itself."""
    used_names = {match[1] or match[3] for match in VARIABLE.finditer(text)}
    names = re.findall(r"(?:^|\s)([A-Za-z_]\w*)=", " ".join(_EXPORTED.findall(text)))
    return [name for name in dict.fromkeys(names) if name not in used_names]


def _lines(text: str) -> Iterator[str]:
    """Yield a text's lines; those of a quotation are one."""
    lines_so_far: list[str] = []
    quote = ""
    for line in text.splitlines():
        _, quote = _end(line, quote)
        lines_so_far.append(line)
        if not quote:
            yield " ".join(lines_so_far)
        elif len(lines_so_far) < _LONGEST_QUOTATION:
            continue
        else:  # an apostrophe, say
            yield from lines_so_far
        lines_so_far, quote = [], ""
    yield from lines_so_far


def _end(line: str, quote: str = "") -> tuple[int, str]:
    """Find where a line ends, or its comment begins, and the quotation mark that is open there; `quote` is open before
    the line."""
    letters = enumerate(line)
    for i, letter in letters:
        if letter == "\\" and quote != "'":
            next(letters, None)
        elif letter == "#" and not quote and (i == 0 or line[i - 1].isspace()):
            return i, quote
        elif letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
    return len(line), quote


class _Branches:
    """Tracks the ifs around a line.

    Attributes:
        open: for each if, whether the present branch runs, and whether any so far does; None where it is not known.
    """

    def __init__(self) -> None:
        self.open: list[tuple[bool | None, bool | None]] = []

    @property
    def runs(self) -> bool | None:
        """Say whether the present line runs; None if it is not known."""
        states = [runs for runs, _ in self.open]
        return False if False in states else None if None in states else True

    def is_one(self, line: str, variables: Mapping[str, str]) -> bool:
        """Say whether the line begins or ends a branch."""
        match = _BRANCH.match(line)
        if match is None or (match[1] != "if" and not self.open) or re.search(r"\bfi\s*$", match[2]):
            return False
        if match[1] == "fi":
            self.open.pop()
            return True
        before = False if match[1] == "if" else self.open.pop()[1]
        holds = True if match[1] == "else" else _holds(match[2], variables)
        runs = False if before or holds is False else None if before is None else holds
        self.open.append((runs, True if before or runs else None if None in (before, runs) else False))
        return True


def _holds(test: str, variables: Mapping[str, str]) -> bool | None:
    """Say whether a test of known texts or numbers holds; None for any other."""
    words = [_expanded(word, variables) for word in _words(test)]
    if not words or words[0] not in ("[", "[[") or any(re.search(r"[$*?]", word) for word in words):
        return None
    match words[1:-1]:
        case [("-z" | "-n") as kind, text]:
            return (text == "") == (kind == "-z")
        case [element, ("=" | "==" | "!=") as sign, other]:
            return (element == other) == (sign != "!=")
        case [element, sign, other] if sign in _COMPARED and element.isdecimal() and other.isdecimal():
            return _COMPARED[sign](int(element), int(other))
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text[: _end(text)[0]])
    except ValueError:  # a quotation that does not end
        return text.split()


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Put known variables into a text and work out its sums; unknown variables stay."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name) or (match[2] if match[2] is not None else variables.get(name, match[0]))

    def replaced(match: re.Match[str]) -> str:
        name, every, old, new = match.groups()
        return variables[name].replace(old, new, -1 if every == "//" else 1) if name in variables else match[0]

    text = _REPLACED.sub(replaced, text)
    for _ in range(4):  # defaults name further variables
        text = VARIABLE.sub(value, text)
    return _ARITHMETIC.sub(lambda match: _sum(match[1], variables) or match[0], text)


def _sum(text: str, variables: Mapping[str, str]) -> str | None:
    expression = re.sub(r"[A-Za-z_]\w*", lambda match: variables.get(match[0], match[0]), text)
    try:
        return str(_number(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < _MOST:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
        if abs(result) < _MOST:
            return result
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("no sum of whole numbers")
