"""Values in a configuration written in Python: calls with literals are followed, nothing is imported or run.

A value is a literal, a list of values, a `Built` (a call, by the last name of what is called), or `Unknown`.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.base.errors import InputError

MOST_BITS = 256  # of a whole number
MOST_CHARACTERS = 2**20
MOST_DEPTH = 50  # of functions that call one another, and of expressions
MOST_STEPS = 10**5  # of all functions together: each may call another twice
MOST_NUMBER = 10**15  # that is computed with

COMPUTES: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def parse_python(text: str) -> ast.Module:
    """The syntax tree of a program; a whole number too long to be printed is a ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the person's own program
        tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value.bit_length() > MOST_BITS:
            raise ValueError(f"a number of {node.value.bit_length()} bits (line {node.lineno})")
    return tree


@dataclass(frozen=True, slots=True)
class Unknown:
    """Text, as written, of an expression that only running the file would evaluate."""

    text: str


@dataclass(slots=True)
class Built:
    """The result of a call: `name` is the dotted name of what is called, without what imports put before it."""

    name: str
    words: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    converters: list[Any] = field(default_factory=list)  # that changed it: `converter.build().convert(it)`

    def copy(self) -> Built:
        """Return a copy, so that changing it leaves this one alone."""
        return Built(self.name, list(self.words), dict(self.named), list(self.converters))


class Module:
    """The functions of one file."""

    depth: int
    steps: int

    def __init__(self, text: str, what: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise InputError(f"{what}: too large: {len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
        try:
            tree = parse_python(text)
        except SyntaxError as error:
            raise InputError(f"{what}: not valid Python: {error.msg} (line {error.lineno})") from None
        except (RecursionError, MemoryError, ValueError):
            raise InputError(f"{what}: not valid Python, or nested too deeply") from None
        self.functions: dict[str, ast.FunctionDef] = {
            item.name: item for item in tree.body if isinstance(item, ast.FunctionDef)
        }
        self.imports: dict[str, str] = {}  # the full name of what a name stands for
        self.names: dict[str, Any] = {}
        self.depth = 0
        self.steps = 0
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom):
                module = "." * statement.level + (statement.module or "")
                self.imports |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in statement.names}
            elif isinstance(statement, ast.Assign):
                self._assign(statement, self.names)

    def call(self, name: str, named: Mapping[str, Any] | None = None) -> Any:
        """Return what a function returns: its last assignments count, of conditions neither branch."""
        if self.depth >= MOST_DEPTH:
            raise InputError(f"functions call one another more than {MOST_DEPTH} deep")
        self.depth += 1
        function = self.functions[name]
        given = function.args
        defaults = [*given.defaults, *(default for default in given.kw_defaults if default is not None)]
        defaulted = [*given.args[len(given.args) - len(given.defaults) :], *given.kwonlyargs][: len(defaults)]
        names = {arg.arg: self.value(default, {}) for arg, default in zip(defaulted, defaults, strict=False)}
        names |= named or {}
        result: Any = Unknown(f"{name}()")
        for statement in function.body:
            if isinstance(statement, ast.Assign):
                self._assign(statement, names)
            elif isinstance(statement, ast.Return) and statement.value is not None:
                result = self.value(statement.value, names)
                break
        self.depth -= 1
        return result

    def _assign(self, statement: ast.Assign, names: dict[str, Any]) -> None:
        value = self.value(statement.value, names)
        for target in statement.targets:
            if isinstance(target, ast.Name):
                names[target.id] = value
            elif isinstance(target, ast.Attribute):
                place = self.value(target.value, names)
                if isinstance(place, Built):
                    place.named[target.attr] = value

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """The value of an expression."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise InputError(f"the file takes more than {MOST_STEPS:,} steps to follow")
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, names) for item in node.elts]
        if isinstance(node, ast.Name):
            return names.get(node.id, self.names.get(node.id, Unknown(node.id)))
        if isinstance(node, ast.Attribute):
            place = self.value(node.value, names)
            if isinstance(place, Built) and node.attr in place.named:
                return place.named[node.attr]
            return Unknown(_source(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand, names)
            return -inner if isinstance(inner, int | float) else Unknown(_source(node))
        if isinstance(node, ast.BinOp) and type(node.op) in COMPUTES:
            return self._computed(node, names)
        if isinstance(node, ast.Call):
            return self._called(node, names)
        return Unknown(_source(node))

    def _computed(self, node: ast.BinOp, names: Mapping[str, Any]) -> Any:
        left, right = self.value(node.left, names), self.value(node.right, names)
        numbers = all(isinstance(item, int | float) and abs(item) < MOST_NUMBER for item in (left, right))
        if not numbers or (isinstance(node.op, ast.FloorDiv) and not right):
            return Unknown(_source(node))
        return COMPUTES[type(node.op)](left, right)

    def _called(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        words = [self.value(item, names) for item in node.args]
        named = {item.arg: self.value(item.value, names) for item in node.keywords if item.arg}
        if isinstance(node.func, ast.Attribute):
            place = self.value(node.func.value, names)
            if node.func.attr == "build" and isinstance(place, Built):
                return place
            if node.func.attr == "convert" and isinstance(place, Built) and words and isinstance(words[0], Built):
                changed = words[0].copy()
                changed.converters.append(place)
                return changed
        name = _source(node.func)
        if name in self.functions:
            return self.call(name, named)
        first, dot, rest = name.partition(".")
        full = self.imports.get(first, first) + dot + rest
        if full == "dataclasses.replace" and words and isinstance(words[0], Built):
            changed = words[0].copy()
            changed.named |= named
            return changed
        return Built(full, words, named)


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        raise InputError("nested too deeply") from None
