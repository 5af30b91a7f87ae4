"""Expansion of shell words: variables, arrays, defaults and arithmetic become text; nothing is executed.

What only a running shell knows (an environment variable, the output of a command) stays as written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from autoplan.base.errors import InputError
from autoplan.frameworks.common.shell_tokens import MAX_DEPTH, NAME, end_of

MAX_CHARACTERS = 2**20  # of a word, and of all commands together

_PLAIN = re.compile(rf"\$({NAME}|[0-9@*#?$!-])", re.ASCII)
_BRACED = re.compile(rf"(#?)({NAME}|[0-9@*]+)(?:\[([^\]]*)\])?(.*)", re.ASCII | re.DOTALL)
# The folder of the script itself.
_DIRNAME = r'\$\(\s*dirname\s+(?:--\s+)?"?\$(?:0|BASH_SOURCE|\{BASH_SOURCE(?:\[0\])?\})"?\s*\)'
_QUIETLY = r"(?:\s*&?>\s*/dev/null(?:\s+2>&1)?)?"
_FOLDER = re.compile(
    rf'{_DIRNAME}|\$\(\s*cd\s+(?:--\s+)?"?{_DIRNAME}(?:/\.\.)*/?"?{_QUIETLY}\s*&&\s*pwd(?:\s+-P)?\s*\)'
)
_OUTPUT = re.compile(r"\$\([^()]*\)|`[^`]*`")
MAX_CHECKED = 4096  # characters of a program's name
_UNQUOTED = re.compile(r"[^\\'\"`$]+")

Value = str | list[str]


class _Words(list[str]):
    """Words that an expansion became, whose blanks part nothing any more."""


def is_open(text: str) -> bool:
    """Return whether a word still contains something that only a running shell knows."""
    return "$" in text or "`" in text


def is_one_word(text: str) -> bool:
    """Return whether a text is one word of a command, whatever the commands in it put there."""
    text = text[:MAX_CHECKED]
    while (shorter := _OUTPUT.sub("", text)) != text:
        text = shorter
    return re.search(r"\s", text) is None


def is_number(text: str) -> bool:
    """Return whether a word is a whole number of at most 15 digits."""
    return re.fullmatch(r"-?\d{1,15}", text, re.ASCII) is not None


class Variables:
    """Variables of a script, and the expansion of words with them."""

    def __init__(self, given: Mapping[str, Value], fixed: Mapping[str, str]) -> None:
        """Begin with the variables that are known; those that are fixed are never assigned."""
        self._fixed = fixed
        self.values: dict[str, Value] = {**given, **fixed}

    def arguments(self) -> list[str]:
        """Return the arguments of the script, as far as they are given: $1, $2 and so on."""
        arguments: list[str] = []
        while isinstance(value := self.values.get(str(len(arguments) + 1)), str):
            arguments.append(value)
        return arguments

    def shift(self, number: int) -> None:
        """Drop the first arguments of the script; the others move up."""
        arguments = self.arguments()
        for place in range(1, len(arguments) + 1):
            self.values.pop(str(place))
        self.values |= {str(place): value for place, value in enumerate(arguments[number:], 1)}

    def items(self, name: str) -> list[str]:
        """Items of an array, or the one value of a plain variable."""
        value = self.values.get(name, [])
        return [value] if isinstance(value, str) else [*value]

    def assign(self, name: str, value: Value) -> None:
        """Set a variable, unless its value is fixed."""
        if name not in self._fixed:
            self.values[name] = value

    def assign_entry(self, name: str, key: str, value: str) -> None:
        """Set an entry of an associative array."""
        self.assign(f"{name}[{self.text(key)}]", value)

    def text(self, raw: str, *, unset: str | None = None, quoted: bool = False) -> str:
        """A word expanded to one string; what is not set becomes `unset`, or stays as it is written."""
        parts = self._inside(raw, unset, 0) if quoted else self._parts(raw, unset)
        return _checked(" ".join(part for part, _ in _joined(parts, split=False)))

    def fields(self, raw: str) -> list[str]:
        """A word expanded to the words that it becomes."""
        return [_checked(part) for part, _ in _joined(self._parts(raw, None), split=True)]

    def _parts(self, raw: str, unset: str | None, depth: int = 0) -> Iterator[tuple[str | list[str], bool]]:
        """Return (text, or the items of an array; whether it is quoted) of every piece of a word."""
        if depth > MAX_DEPTH:
            raise InputError(f"a shell word is nested more than {MAX_DEPTH} deep")
        at = 0
        while at < len(raw):
            stop = match.end() if (match := _UNQUOTED.match(raw, at)) else end_of(raw, at)
            piece, character = raw[at:stop], raw[at]
            at = stop
            if character == "\\":
                yield piece[1:].strip("\n"), True
            elif character == "'":
                yield piece[1:].removesuffix("'"), True
            elif character == '"':
                inside = piece[1:].removesuffix('"') if len(piece) > 1 else ""
                values = [value for value, _ in self._inside(inside, unset, depth + 1)]
                if values != [[]]:  # a list without items is no word, not an empty one
                    yield "", True
                    yield from ((value, True) for value in values)
            elif character == "$":
                if (match := _PLAIN.match(raw, stop - len(piece))) and not piece[1:]:
                    at = match.end()
                    yield self._variable(match[1], match[0], unset), False
                else:
                    yield self._expansion(piece, unset, depth + 1), False
            else:
                yield piece, False

    def _inside(self, text: str, unset: str | None, depth: int) -> Iterator[tuple[str | list[str], bool]]:
        at = 0
        while at < len(text):
            character = text[at]
            if character == "\\":
                follows = text[at + 1 : at + 2]
                yield (follows if follows in '$`"\\' else "" if follows == "\n" else f"\\{follows}"), True
                at += 2
            elif character == "$":
                stop = end_of(text, at)
                if (match := _PLAIN.match(text, at)) and stop == at + 1:
                    stop = match.end()
                    yield self._variable(match[1], match[0], unset), True
                else:
                    value = self._expansion(text[at:stop], unset, depth)
                    yield (" ".join(value) if isinstance(value, _Words) else value), True
                at = stop
            else:
                stop = min((sign_at for sign in "$\\" if (sign_at := text.find(sign, at)) >= 0), default=len(text))
                yield text[at:stop], True
                at = stop

    def _variable(self, name: str, raw: str, unset: str | None) -> Value:
        if name in "@*":
            return self.arguments()
        if name == "#":
            return str(len(self.arguments()))
        if name in self.values:
            value = self.values[name]
            return value if isinstance(value, str) else (value[0] if value else "")
        return raw if unset is None else unset

    def _expansion(self, piece: str, unset: str | None, depth: int) -> Value:
        """Return the value of `${...}`, `$((...))`, `$(expr ...)` or of the script's own folder, which is ".".

        The output of another command stays as it is written.
        """
        if piece.startswith("$((") and piece.endswith("))"):
            number = self._arithmetic(piece[3:-2])
            return piece if number is None else str(number)
        if _FOLDER.fullmatch(piece):
            return "."
        if calculation := re.fullmatch(r"\$\(\s*expr\s+([^()]+)\)", piece):
            number = self._arithmetic(calculation[1].replace("\\*", "*"))
            return piece if number is None else str(number)
        if not (piece.startswith("${") and piece.endswith("}")):
            return piece
        match = _BRACED.fullmatch(piece[2:-1])
        if match is None:
            return piece
        count, name, index, operation = match.groups()
        value: Value | None = self.arguments() if name in ("@", "*") else self.values.get(name)
        if index is not None and (entry := self.values.get(f"{name}[{self.text(index)}]")) is not None:
            value = entry
        elif index is not None and value is not None:
            items = self.items(name)
            if index in ("@", "*"):
                value = items if index == "@" else " ".join(items)
            elif (place := self._arithmetic(index)) is None:  # such as that of a job of a Slurm array
                return piece
            else:
                value = items[place] if -len(items) <= place < len(items) else ""
        elif isinstance(value, list) and name not in ("@", "*"):
            value = value[0] if value else ""
        if count:
            return str(len(value or ""))
        sign = re.match(r":?[-=+?]", operation)
        if sign:
            operand = operation[sign.end() :]
            missing = value is None or (sign[0][0] == ":" and not value)
            if sign[0][-1] == "+":
                return "" if missing else self._default(operand, unset, depth)
            if missing and sign[0][-1] in "-=":
                result = self._default(operand, unset, depth)
                if sign[0][-1] == "=":
                    self.assign(name, " ".join(result))
                return result
        if value is None:
            return piece if unset is None else unset
        if isinstance(value, list) and (part := re.fullmatch(r":\s*(\d{1,6})(?::(\d{1,6}))?", operation)):
            start = int(part[1]) - (name in ("@", "*"))  # $@ begins with $1
            return value[max(start, 0) :][: int(part[2]) if part[2] else None]
        if isinstance(value, str) and operation in (",,", "^^"):
            return value.lower() if operation == ",," else value.upper()
        return value if not operation or sign else piece

    def _default(self, text: str, unset: str | None, depth: int) -> Value:
        return _Words(part for part, _ in _joined(self._parts(text, unset, depth), split=True))

    def _arithmetic(self, text: str) -> int | None:
        plain = self.text(text)
        if is_open(plain) or len(plain) > 200:
            return None
        try:
            return self._number(ast.parse(plain.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                return value
            case ast.Name(id=name):
                text = self.values.get(name)
                if isinstance(text, str) and is_number(text):
                    return int(text)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=operator, right=right):
                a, b = self._number(left), self._number(right)
                if max(abs(a), abs(b)) < 2**40:
                    match operator:
                        case ast.Add():
                            return a + b
                        case ast.Sub():
                            return a - b
                        case ast.Mult():
                            return a * b
                        case ast.Div():
                            return abs(a) // abs(b) * (1 if a * b >= 0 else -1)
                        case ast.Mod():
                            return a - b * (abs(a) // abs(b) * (1 if a * b >= 0 else -1))
        raise ValueError("neither a number nor a sum, difference, product, quotient or rest of numbers")


def _checked(text: str) -> str:
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"a word of the script is longer than {MAX_CHARACTERS:,} characters")
    return text


def _joined(parts: Iterator[tuple[str | list[str], bool]], *, split: bool) -> list[tuple[str, bool]]:
    """The words that pieces make: what is not quoted ends them at blanks, items of an array are words of their own."""
    words: list[list[str]] = []
    going = False  # whether the last word goes on
    size = 0
    for value, quoted in parts:
        if isinstance(value, list):
            unsplit = quoted or not split or isinstance(value, _Words)
            pieces: list[str] = value if unsplit else [word for item in value for word in _split(item)]
            for place, item in enumerate(pieces):
                going = _add(words, item, going and place == 0)
                size += len(item)
            continue
        size += len(value)
        if size > MAX_CHARACTERS:
            raise InputError(f"a word of the script is longer than {MAX_CHARACTERS:,} characters")
        if quoted or not split:
            going = _add(words, value, going)
            continue
        blank = value[:1].isspace()
        for place, word in enumerate(_split(value)):
            going = _add(words, word, going and place == 0 and not blank)
        if value[-1:].isspace():
            going = False
    return [("".join(word), True) for word in words]


def _split(text: str) -> list[str]:
    """The parts between blanks; what a running shell would expand stays whole."""
    if not is_open(text):
        return text.split()
    words, start, at = [], 0, 0
    while at < len(text):
        if text[at].isspace():
            words.append(text[start:at])
            start = at = at + 1
        else:
            at = end_of(text, at) if text[at] in "$`" else at + 1
    return [word for word in (*words, text[start:]) if word]


def _add(words: list[list[str]], text: str, going: bool) -> bool:
    if going:
        words[-1].append(text)
    else:
        words.append([text])
    return True
