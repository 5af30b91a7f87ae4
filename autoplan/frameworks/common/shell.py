"""Commands that a bash script starts: variables, arrays, conditions, here-documents are followed, never run.

This is not a shell: nothing is executed and no file is opened.  What only a running shell knows (a variable of the
environment, the output of a command) stays in the words as it is written, so that a reader can name it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise

from autoplan.base.errors import InputError

MOST_CHARACTERS = 2**20  # of a word, and of all commands together
MOST_DEPTH = 25  # of what is nested in one another

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({_NAME})(?:\[(\d+)\])?(\+?)=", re.ASCII)
_PLAIN = re.compile(rf"\$({_NAME}|[0-9@*#?$!-])", re.ASCII)
_BRACED = re.compile(rf"(#?)({_NAME}|[0-9@*]+)(?:\[([^\]]*)\])?(.*)", re.ASCII | re.DOTALL)
_UNQUOTED = re.compile(r"[^\\'\"`$]+")
_OPERATORS = (
    "<<<",
    "<<-",
    "&&",
    "||",
    ";;",
    "|&",
    "&>",
    "<<",
    ">>",
    ">&",
    "<&",
    "\n",
    ";",
    "|",
    "&",
    "(",
    ")",
    "<",
    ">",
)
_LIST = ("&&", "||")
_DIRECTIVE = re.compile(r"^[ \t]*#SBATCH[ \t]+(.*?)[ \t]*(?: #.*)?$", re.MULTILINE)
_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_TASKS = ("SLURM_NTASKS_PER_NODE",)
# Options of sbatch, and the variables of the job that they set (man sbatch, output environment variables).
_DIRECTIVES = {
    **dict.fromkeys(("--nodes", "-N"), _NODES),
    **dict.fromkeys(("--gpus-per-node", "--gres"), _GPUS),
    "--ntasks-per-node": _TASKS,
}
_DECLARES = ("export", "declare", "local", "readonly", "typeset")

Value = str | list[str]


class _Words(list[str]):
    """Words that an expansion became, whose blanks part nothing any more."""


def is_open(text: str) -> bool:
    """Return whether a word still holds what only a running shell knows."""
    return "$" in text or "`" in text


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one simple command, expanded; `text` is its here-document."""

    words: tuple[str, ...]
    text: str = ""


@dataclass(slots=True)
class Script:
    """Content of a script: its commands in order, its variables at the end, and what could not be decided."""

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, Value] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)


def read_script(text: str, fixed: Sequence[tuple[str, str]] = ()) -> Script:
    """Commands of a bash script with Slurm's directives; the script assigns none of the `fixed` variables."""
    state = _State(dict(fixed))
    state.variables = slurm_variables(text) | state.variables
    state.run(text, 0)
    return Script(state.commands, state.variables, state.open)


def slurm_variables(text: str) -> dict[str, Value]:
    """Variables of a job that follow from its lines '#SBATCH --nodes=2', '--gpus-per-node=h100:8' and the like."""
    variables: dict[str, Value] = {}
    for line in _DIRECTIVE.findall(text):
        for option, value in re.findall(r"(-[A-Za-z]|--[a-z-]+)[= ]*([\w:.-]+)?", line):
            count = (value or "").rpartition(":")[2]
            if option in _DIRECTIVES and count.isdecimal():
                variables |= dict.fromkeys(_DIRECTIVES[option], count)
    return variables


# -- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "word", "array", "text" or "operator"
    raw: str
    items: tuple[str, ...] = ()


def _end(text: str, at: int, depth: int = 0) -> int:
    """Return the position behind the quoted part or expansion that begins at `at`."""
    if depth > MOST_DEPTH:
        raise InputError(f"a shell word is nested more than {MOST_DEPTH} deep")
    first, second = text[at], text[at + 1 : at + 2]
    if first == "\\":
        return min(at + 2, len(text))
    if first == "'":
        return _behind(text, "'", at + 1)
    if first == "`":
        return _behind(text, "`", at + 1)
    if first == '"':
        closer, at = '"', at + 1
    elif first == "$" and second in "({" and second:
        closer, at = (")" if second == "(" else "}"), at + 2
    else:
        return at + 1
    opener = {")": "(", "}": "{"}.get(closer)
    level = 1
    while at < len(text):
        character = text[at]
        if character == closer:
            level, at = level - 1, at + 1
            if not level:
                return at
        elif character == opener:
            level, at = level + 1, at + 1
        elif character in '\\"`$' or (character == "'" and closer != '"'):
            at = _end(text, at, depth + 1)
        else:
            at += 1
    return len(text)


def _behind(text: str, mark: str, start: int) -> int:
    mark_at = text.find(mark, start)
    return len(text) if mark_at < 0 else mark_at + 1


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    waiting: list[tuple[str, bool]] = []  # ends of here-documents, and whether these are expanded
    at = 0
    while at < len(text):
        character = text[at]
        if character in " \t\r":
            at += 1
        elif text.startswith("\\\n", at):
            at += 2
        elif character == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif operator := next((sign for sign in _OPERATORS if text.startswith(sign, at)), None):
            at += len(operator)
            if operator in ("<<", "<<-"):
                start = at + len(text[at:]) - len(text[at:].lstrip(" \t"))
                at = _word_end(text, start)
                mark = text[start:at]
                waiting.append((re.sub(r"[\\'\"]", "", mark), mark.isidentifier()))
            elif operator == "\n" and waiting:
                for mark, expands in waiting:
                    body, at = _here_document(text, at, mark)
                    tokens.append(_Token("text" if expands else "quoted text", body))
                waiting.clear()
                tokens.append(_Token("operator", "\n"))
            else:
                tokens.append(_Token("operator", operator))
        else:
            start, at = at, _word_end(text, at)
            raw = text[start:at]
            if (match := _ASSIGNMENT.fullmatch(raw)) and text.startswith("(", at):
                items, at = _array(text, at + 1)
                tokens.append(_Token("array", match[1] + match[3], items))
            elif not (raw.isdigit() and text[at : at + 1] in ("<", ">")):  # the number of a stream
                tokens.append(_Token("word", raw))
    return tokens


def _word_end(text: str, at: int) -> int:
    while at < len(text) and text[at] not in " \t\r\n;|&()<>":
        at = _end(text, at)
    return at


def _array(text: str, at: int) -> tuple[tuple[str, ...], int]:
    items = []
    while at < len(text) and text[at] != ")":
        if text[at] in " \t\r\n":
            at += 1
        elif text.startswith("\\\n", at):
            at += 2
        elif text[at] == "#":
            at = _behind(text, "\n", at)
        else:
            start, at = at, max(_word_end(text, at), at + 1)
            items.append(text[start:at])
    return tuple(items), at + 1


def _here_document(text: str, at: int, mark: str) -> tuple[str, int]:
    lines = []
    while at < len(text):
        stop = _behind(text, "\n", at)
        line, at = text[at:stop], stop
        if line.strip("\t\r\n") == mark:
            break
        lines.append(line)
    return "".join(lines), at


# -- statements -------------------------------------------------------------------------------------------------------


class _State:
    """Variables and commands so far.  Of loops the first round is read, of conditions the branch that holds."""

    def __init__(self, fixed: dict[str, str]) -> None:
        self.fixed = fixed
        self.variables: dict[str, Value] = dict(fixed)
        self.commands: list[Command] = []
        self.open: list[str] = []
        self.size = 0

    def run(self, text: str, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise InputError(f"a script is nested more than {MOST_DEPTH} deep")
        tokens = _tokens(text)
        at = 0
        while at < len(tokens):
            at = self._block(tokens, at, (), True, depth) + 1

    def _block(self, tokens: list[_Token], at: int, ends: tuple[str, ...], runs: bool, depth: int) -> int:
        """Reads statements up to one of the words in `ends`; where it stands comes back."""
        if depth > MOST_DEPTH:
            raise InputError(f"a script is nested more than {MOST_DEPTH} deep")
        goes_on = True
        while at < len(tokens):
            token = tokens[at]
            if token.raw in ends and token.kind in ("word", "operator"):
                return at
            if token.kind == "operator":
                goes_on = goes_on if token.raw in _LIST else True
                at += 1
            elif token.raw == "if":
                at = self._if(tokens, at + 1, runs, depth + 1)
            elif token.raw in ("for", "while", "until", "select"):
                at = self._loop(tokens, at, runs, depth + 1)
            elif token.raw == "case":
                at = self._case(tokens, at + 1, runs, depth + 1)
            elif token.raw in ("{", "}", "function", "then", "do", "done", "fi", "esac"):
                at += 1
            else:
                command, at = self._simple(tokens, at)
                status = self._do(command, depth) if runs and goes_on else None
                if at < len(tokens) and tokens[at].raw in _LIST and tokens[at].kind == "operator":
                    # What is joined by && follows unless the first part is known to fail; || only where it is.
                    goes_on = goes_on and (status is not False if tokens[at].raw == "&&" else status is False)
        return at

    def _simple(self, tokens: list[_Token], at: int) -> tuple[list[_Token], int]:
        """The tokens of one command; redirections and their targets are left out."""
        command: list[_Token] = []
        test = tokens[at].raw == "[["
        while at < len(tokens):
            token = tokens[at]
            if token.kind == "operator":
                if test and token.raw != "\n":
                    command.append(token)
                elif token.raw in ("<", ">", ">>", ">&", "<&", "&>", "<<<"):
                    at += 1
                elif token.raw == "\n" and at + 1 < len(tokens) and tokens[at + 1].kind.endswith("text"):
                    pass
                else:
                    return command, at
            elif token.kind.endswith("text"):
                command.append(token)
            else:
                command.append(token)
                if test and token.raw == "]]":
                    return command, at + 1
            at += 1
        return command, at

    def _if(self, tokens: list[_Token], at: int, runs: bool, depth: int) -> int:
        decided: bool | None = False  # whether a branch has been taken
        while at < len(tokens):
            start = at
            at = self._block(tokens, at, ("then",), False, depth) + 1
            holds = self._condition(tokens[start : at - 1]) if runs and decided is False else False
            if holds is None:
                self._undecided(tokens[start : at - 1])
                decided = None
            at = self._block(tokens, at, ("elif", "else", "fi"), runs and decided is False and holds is True, depth)
            decided = True if decided is False and holds else decided
            if at < len(tokens) and tokens[at].raw == "else":
                at = self._block(tokens, at + 1, ("fi",), runs and decided is False, depth)
            if at >= len(tokens) or tokens[at].raw == "fi":
                return at + 1
            at += 1
        return at

    def _undecided(self, tokens: list[_Token]) -> None:
        words = " ".join(token.raw for token in tokens if token.raw.strip("\n;"))
        self.open.append(f"if {words[:60]}")

    def _loop(self, tokens: list[_Token], at: int, runs: bool, depth: int) -> int:
        start = at
        while at < len(tokens) and tokens[at].raw != "do":
            at += 1
        head = [token.raw for token in tokens[start:at] if token.kind == "word"]
        if runs and len(head) > 3 and head[0] == "for" and head[2] == "in":
            values = [value for raw in head[3:] for value in self.fields(raw)]
            self._assign(head[1], values[0] if values else "")
            if len(values) > 1:
                self.open.append(f"for {head[1]} (the first round is read)")
        elif runs and head[0] == "while" and self._condition(tokens[start + 1 : at]) is False:
            runs = False
        return self._block(tokens, at + 1, ("done",), runs, depth) + 1

    def _case(self, tokens: list[_Token], at: int, runs: bool, depth: int) -> int:
        subject = self.text(tokens[at].raw) if at < len(tokens) else ""
        at += 1
        has_matched = False
        while at < len(tokens) and tokens[at].raw in ("in", "\n"):
            at += 1
        while at < len(tokens) and tokens[at].raw != "esac":
            patterns = []
            while at < len(tokens) and tokens[at].raw != ")":
                if tokens[at].kind == "word":
                    patterns.append(self.text(tokens[at].raw))
                at += 1
            holds = not has_matched and any(fnmatchcase(subject, pattern) for pattern in patterns)
            has_matched = has_matched or holds
            at = self._block(tokens, at + 1, (";;", "esac"), runs and holds, depth)
            while at < len(tokens) and tokens[at].raw in (";;", "\n"):
                at += 1
        return at + 1

    def _do(self, tokens: list[_Token], depth: int) -> bool | None:
        """Carries out an assignment, notes a command; whether it succeeds, where that can be told."""
        at = 0
        while at < len(tokens) and (
            tokens[at].kind == "array" or tokens[at].raw in _DECLARES or self._is_set(tokens[at])
        ):
            self._set(tokens[at])
            at += 1
        tokens = tokens[at:]
        if not tokens:
            return True
        if tokens[0].raw == ":":
            for token in tokens[1:]:
                self.fields(token.raw)  # which assigns the default of ${NAME:=default}
            return True
        if tokens[0].raw in ("[", "[[", "test", "true", "false", "!"):
            return self._condition(tokens)
        words = tuple(word for token in tokens if token.kind == "word" for word in self.fields(token.raw))
        if words and words[0] == "unset":
            for name in words[1:]:
                self.variables.pop(name, None)
            return True
        text = "".join(
            self.text(token.raw, quoted=True) if token.kind == "text" else token.raw
            for token in tokens
            if token.kind.endswith("text")
        )
        self.size += sum(map(len, words)) + len(text)
        if self.size > MOST_CHARACTERS:
            raise InputError(f"the commands of the script are longer than {MOST_CHARACTERS:,} characters")
        if words and words[0] == "read" and text:
            self._read(words[1:], text)
        elif words and words[0] == "eval":
            self.run(" ".join(words[1:]), depth + 1)
        elif words or text:
            self.commands.append(Command(words, text))
        return None

    def _read(self, words: tuple[str, ...], text: str) -> None:
        """Assign what `read` takes of a here-document: all of it with -d '', else its first line."""
        names = [word for word in words if re.fullmatch(_NAME, word)]
        is_whole = any(re.fullmatch(r"-[a-z]*d", word) and follows == "" for word, follows in pairwise(words))
        if len(names) == 1:
            self._assign(names[0], (text if is_whole else text.partition("\n")[0]).strip())

    def _is_set(self, token: _Token) -> bool:
        return token.kind == "word" and _ASSIGNMENT.match(token.raw) is not None

    def _set(self, token: _Token) -> None:
        if token.kind == "array":
            name, adds = token.raw.removesuffix("+"), token.raw.endswith("+")
            items = [item for raw in token.items for item in self.fields(raw)]
            before = self._list(name) if adds else []
            self._assign(name, [*before, *items])
        elif match := _ASSIGNMENT.match(token.raw):
            text = self.text(token.raw[match.end() :])
            if match[2] is not None:
                items = self._list(match[1])
                items[int(match[2]) : int(match[2]) + 1] = [text]
                self._assign(match[1], items)
            else:
                self._assign(match[1], " ".join(self._list(match[1])) + text if match[3] else text)

    def _list(self, name: str) -> list[str]:
        value = self.variables.get(name, [])
        return [value] if isinstance(value, str) else list(value)

    def _assign(self, name: str, value: Value) -> None:
        if name not in self.fixed:
            self.variables[name] = value

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _condition(self, tokens: list[_Token]) -> bool | None:
        """Return whether tests joined by && and || hold; None where that cannot be told."""
        holds: bool | None = True
        joint = "&&"
        part: list[_Token] = []
        for token in [*tokens, _Token("operator", ";")]:
            if token.kind != "operator" or token.raw in ("(", ")", "<", ">"):
                part.append(token)
                continue
            if part:
                value = self._test([item.raw for item in part])
                if joint == "&&":
                    holds = False if False in (holds, value) else None if None in (holds, value) else True
                else:
                    holds = True if True in (holds, value) else None if None in (holds, value) else False
                part = []
            if token.raw in _LIST:
                joint = token.raw
        return holds

    def _test(self, raws: list[str]) -> bool | None:
        words = [raw for raw in raws if raw not in ("[", "]", "[[", "]]", "test", "(", ")")]
        if words[:1] == ["!"]:
            value = self._test(words[1:])
            return None if value is None else not value
        if not words:
            return True
        if len(words) == 1:
            if raws[0] in ("[", "[[", "test"):
                return bool(self.text(words[0], unset=""))
            return {"true": True, ":": True, "false": False}.get(words[0])
        if len(words) == 2 and words[0] in ("-n", "-z"):
            return bool(self.text(words[1], unset="")) is (words[0] == "-n")
        if len(words) != 3:
            return None
        left, sign, right = self.text(words[0], unset=""), words[1], self.text(words[2], unset="")
        if is_open(left) or is_open(right):
            return None
        if sign in ("=", "=="):
            return fnmatchcase(left, right) if raws[0] == "[[" else left == right
        if sign == "!=":
            return left != right
        numbers = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
        if sign in numbers and _is_number(left) and _is_number(right):
            a, b = int(left), int(right)
            return {"==": a == b, "!=": a != b, ">": a > b, ">=": a >= b, "<": a < b, "<=": a <= b}[numbers[sign]]
        return None

    # -- expansion ----------------------------------------------------------------------------------------------------

    def text(self, raw: str, *, unset: str | None = None, quoted: bool = False) -> str:
        """A word expanded to one string; what is not set becomes `unset`, or stays as it is written."""
        parts = self._inside(raw, unset, 0) if quoted else self._parts(raw, unset)
        return _checked(" ".join(part for part, _ in _joined(parts, split=False)))

    def fields(self, raw: str) -> list[str]:
        """A word expanded to the words that it becomes."""
        return [_checked(part) for part, _ in _joined(self._parts(raw, None), split=True)]

    def _parts(self, raw: str, unset: str | None, depth: int = 0) -> Iterator[tuple[str | list[str], bool]]:
        """Return (text, or the items of an array; whether it is quoted) of every piece of a word."""
        if depth > MOST_DEPTH:
            raise InputError(f"a shell word is nested more than {MOST_DEPTH} deep")
        at = 0
        while at < len(raw):
            stop = match.end() if (match := _UNQUOTED.match(raw, at)) else _end(raw, at)
            piece, character = raw[at:stop], raw[at]
            at = stop
            if character == "\\":
                yield piece[1:].strip("\n"), True
            elif character == "'":
                yield piece[1:].removesuffix("'"), True
            elif character == '"':
                yield "", True
                for value, _ in self._inside(piece[1:].removesuffix('"') if len(piece) > 1 else "", unset, depth + 1):
                    yield value, True
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
                stop = _end(text, at)
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
            return []
        if name == "#":
            return "0"
        if name in self.variables:
            value = self.variables[name]
            return value if isinstance(value, str) else (value[0] if value else "")
        return raw if unset is None else unset

    def _expansion(self, piece: str, unset: str | None, depth: int) -> Value:
        """Return the value of `${...}`, `$((...))` or `$(expr ...)`; the output of a command stays as it is written."""
        if piece.startswith("$((") and piece.endswith("))"):
            number = self._arithmetic(piece[3:-2])
            return piece if number is None else str(number)
        if calculation := re.fullmatch(r"\$\(\s*expr\s+([^()]+)\)", piece):
            number = self._arithmetic(calculation[1].replace("\\*", "*"))
            return piece if number is None else str(number)
        if not (piece.startswith("${") and piece.endswith("}")):
            return piece
        match = _BRACED.fullmatch(piece[2:-1])
        if match is None:
            return piece
        count, name, index, operation = match.groups()
        value: Value | None = [] if name in ("@", "*") else self.variables.get(name)
        if index is not None and value is not None:
            items = self._list(name)
            if index not in ("@", "*"):
                value = items[int(index)] if index.isdigit() and int(index) < len(items) else ""
            else:
                value = items if index == "@" else " ".join(items)
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
                    self._assign(name, " ".join(result))
                return result
        if value is None:
            return piece if unset is None else unset
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
                text = self.variables.get(name)
                if isinstance(text, str) and _is_number(text):
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


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,15}", text, re.ASCII) is not None


def _checked(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"a word of the script is longer than {MOST_CHARACTERS:,} characters")
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
        if size > MOST_CHARACTERS:
            raise InputError(f"a word of the script is longer than {MOST_CHARACTERS:,} characters")
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
            at = _end(text, at) if text[at] in "$`" else at + 1
    return [word for word in (*words, text[start:]) if word]


def _add(words: list[list[str]], text: str, going: bool) -> bool:
    if going:
        words[-1].append(text)
    else:
        words.append([text])
    return True
