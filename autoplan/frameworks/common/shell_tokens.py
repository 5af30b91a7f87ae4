"""Tokens of a bash script: words as they are written, arrays, here-documents and operators."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoplan.base.errors import InputError

MAX_DEPTH = 25  # of what is nested in one another
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"({NAME})(?:\[([^\]\s]+)\])?(\+?)=", re.ASCII)
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w ./:-]*>(?=[\s\"'`;)/]|$)")  # of a template: <path to checkpoints>
_OPERATORS = (
    "&>>",
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


@dataclass(frozen=True, slots=True)
class Token:
    """Part of a script between blanks, as it is written; an array has its items."""

    kind: str  # "word", "array", "text" or "operator"
    raw: str
    items: tuple[str, ...] = ()


def end_of(text: str, at: int, depth: int = 0) -> int:
    """Return the position behind the quoted part or expansion that begins at `at`."""
    if depth > MAX_DEPTH:
        raise InputError(f"a shell word is nested more than {MAX_DEPTH} deep")
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
            at = end_of(text, at, depth + 1)
        else:
            at += 1
    return len(text)


def _behind(text: str, mark: str, start: int) -> int:
    mark_at = text.find(mark, start)
    return len(text) if mark_at < 0 else mark_at + 1


def tokens_of(text: str) -> list[Token]:
    """Part a script into tokens; here-documents stand behind their line; raises InputError of what nests too deep."""
    tokens: list[Token] = []
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
        elif (
            operator := next((sign for sign in _OPERATORS if text.startswith(sign, at)), None)
        ) and not _PLACEHOLDER.match(text, at):
            at += len(operator)
            if operator in ("<<", "<<-"):
                start = at + len(text[at:]) - len(text[at:].lstrip(" \t"))
                at = _word_end(text, start)
                mark = text[start:at]
                waiting.append((re.sub(r"[\\'\"]", "", mark), mark.isidentifier()))
            elif operator == "\n" and waiting:
                for mark, expands in waiting:
                    body, at = _here_document(text, at, mark)
                    tokens.append(Token("text" if expands else "quoted text", body))
                waiting.clear()
                tokens.append(Token("operator", "\n"))
            else:
                tokens.append(Token("operator", operator))
        else:
            start, at = at, _word_end(text, at)
            raw = text[start:at]
            if not re.search(r"['\"]", raw):
                raw = _PLACEHOLDER.sub(r"'\g<0>'", raw)  # whose blanks part no words
            if (match := ASSIGNMENT.fullmatch(raw)) and text.startswith("(", at):
                items, at = _array(text, at + 1)
                tokens.append(Token("array", match[1] + match[3], items))
            elif not (raw.isdigit() and text[at : at + 1] in ("<", ">")):  # the number of a stream
                tokens.append(Token("word", raw))
    return tokens


def _word_end(text: str, at: int) -> int:
    while at < len(text):
        if placeholder := _PLACEHOLDER.match(text, at):
            at = placeholder.end()
        elif text[at] in " \t\r\n;|&()<>":
            break
        else:
            at = end_of(text, at)
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
