"""Values in a Python configuration, found by following its statements; nothing is imported or executed.

A value is a literal, a list of values, a `Built` (an object that a call makes), or `Unknown`.
"""

from __future__ import annotations

import ast
import builtins
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.options import Unknown

MAX_BITS = 256  # of a whole number
MAX_CHARACTERS = 2**20
MAX_DEPTH = 50  # of functions that call one another
MAX_STEPS = 10**5  # of all functions together: each may call another twice
MAX_NUMBER = 10**15  # that is computed with
MAX_ITEMS = 10**5  # of a list

_COMPUTES: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_COMPARES: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_HARMLESS = (*dir(builtins), "logger", "logging", "warnings")  # functions that change nothing that they are given
RUNNING, _FOREIGN = "only known when the file runs", "a function in another file may change its arguments"


@dataclass(slots=True, eq=False)
class Built:
    """The result of a call: `name` is the dotted name of what is called, by the imports of the file.

    A `place` is what the file was given or finds in an object, and whose settings it reads or changes.  `condition` is
    the test on which the call depends, where it could not be decided.
    """

    name: str
    words: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)
    converters: list[Any] = field(default_factory=list)  # that changed it: `converter.build().convert(it)`
    is_place: bool = False
    condition: str = ""

    def copy(self) -> Built:
        """Return a copy, so that changing it leaves this one alone."""
        return replace(self, words=list(self.words), named=dict(self.named), converters=list(self.converters))


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """A statement that was not followed and may change an object."""

    text: str
    why: str


def dotted(node: ast.expr) -> str:
    """Return the dotted name of an expression without calls."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


class Module:
    """The functions of one file, and the objects whose attributes it has set so far (`changed`)."""

    def __init__(self, text: str, title: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise InputError(f"{title}: too large: {len(text):,} characters, at most {MAX_CHARACTERS:,} are read")
        tree = parsed(text, title)
        self.functions: dict[str, ast.FunctionDef] = {
            item.name: item for item in tree.body if isinstance(item, ast.FunctionDef)
        }
        self.imports: dict[str, str] = {}  # the full name of what a name stands for
        self.names: dict[str, Any] = {}
        self.changed: list[Built] = []
        self.unfollowed: list[Unfollowed] = []
        self.depth: int = 0
        self.steps: int = 0
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                self.imports |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                self.imports |= {(alias.asname or alias.name).partition(".")[0]: alias.name for alias in node.names}
        self._run(tree.body, self.names)

    def call(self, name: str, words: Sequence[Any] = (), named: Mapping[str, Any] | None = None) -> Any:
        """Return the result of a function, following its last assignments and the branches that hold."""
        if self.depth >= MAX_DEPTH:
            raise InputError(f"functions call one another more than {MAX_DEPTH} deep")
        self.depth += 1
        signature = self.functions[name].args
        places = [*signature.posonlyargs, *signature.args]
        names: dict[str, Any] = {arg.arg: Built(arg.arg, is_place=True) for arg in (*places, *signature.kwonlyargs)}
        defaults: list[tuple[ast.arg, ast.expr | None]] = [
            *zip(places[::-1], signature.defaults[::-1], strict=False),
            *zip(signature.kwonlyargs, signature.kw_defaults, strict=True),
        ]
        names |= {arg.arg: self.value(default, self.names) for arg, default in defaults if default is not None}
        names |= {arg.arg: word for arg, word in zip(places, words, strict=False)}
        names |= named or {}
        returned = self._run(self.functions[name].body, names)
        self.depth -= 1
        return returned[0] if returned else Unknown(f"{name}()")

    # -- statements ---------------------------------------------------------------------------------------------------

    def _run(self, body: Iterable[ast.stmt], names: dict[str, Any]) -> tuple[Any] | None:
        """Follow statements up to a return statement, and return its value."""
        for node in body:
            returned = None
            match node:
                case ast.Return(value=result):
                    return (None if result is None else self.value(result, names),)
                case ast.Assign(targets=targets, value=expression):
                    value = self.value(expression, names)
                    changed = self._helped(expression, names)
                    if (
                        changed is not None
                        and isinstance(targets[0], ast.Name)
                        and self._root(targets[0], names) is changed
                    ):
                        value = changed  # cfg = helper(cfg)
                        self.unfollowed.append(Unfollowed(_source(expression)[:60], _FOREIGN))
                    for target in targets:
                        self._assign(target, value, names)
                case ast.AnnAssign(target=target, value=ast.expr() as expression):
                    self._assign(target, self.value(expression, names), names)
                case ast.AugAssign(target=target, op=sign, value=expression):
                    self._assign(target, self._computed(ast.BinOp(target, sign, expression), names), names)
                case ast.Expr(value=ast.Call() as call):
                    if self._helped(call, names) is not None:
                        self.unfollowed.append(Unfollowed(_source(call)[:60], _FOREIGN))
                    self.value(call, names)
                case ast.If(test=test, body=branch, orelse=other) if _is_plain(holds := self.value(test, names)):
                    returned = self._run(branch if holds else other, names)
                case ast.With(body=branch):
                    returned = self._run(branch, names)
                case ast.If() | ast.For() | ast.While() | ast.Try():
                    self._pass_over(node, names)
            if returned:
                return returned
        return None

    def _pass_over(self, node: ast.stmt, names: dict[str, Any]) -> None:
        """Record a statement that is not followed and may change an object; its result is unknown."""
        text = _source(node).splitlines()[0][:60]
        if self._changes(node, names):
            self.unfollowed.append(Unfollowed(text, RUNNING))
        for item in ast.walk(node):
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
                if item.id not in names:
                    names[item.id] = Built(item.id, words=[text], is_place=True)
                elif not isinstance(names[item.id], Built):
                    names[item.id] = Unknown(item.id)

    def _helped(self, node: ast.expr, names: Mapping[str, Any]) -> Built | None:
        """Return the object that a call to a function in another file may change."""
        if not isinstance(node, ast.Call):
            return None
        first, _, attributes = (dotted(node.func) or "?").partition(".")
        if first in self.functions or first in _HARMLESS or self._root(node.func, names):
            return self._root(node.func, names) if attributes else None  # a method of its own
        if (attributes.rpartition(".")[2] or first)[:1].isupper():  # of a class, which makes another object
            return None
        handed = (*node.args, *(item.value for item in node.keywords))
        return next((root for item in handed if (root := self._root(item, names))), None)

    def _changes(self, node: ast.AST, names: dict[str, Any]) -> bool:
        """Return whether a statement may change an object: it sets attributes, or hands it to a function."""
        for item in ast.walk(node):
            touched: list[ast.expr] = []
            if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
                touched = [item]
            elif isinstance(item, ast.Expr) and self._helped(item.value, names) is not None:
                return True
            if any(self._root(expression, names) for expression in touched):
                return True
        return False

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value if isinstance(value, list) and len(value) == len(target.elts) else []
            for at, item in enumerate(target.elts):
                self._assign(item, parts[at] if parts else Built(dotted(item), is_place=True), names)
        elif isinstance(target, ast.Attribute) and (root := self._root(target, names)):
            place = self._place(target.value, names)
            if root not in self.changed:
                self.changed.append(root)
            place.named[target.attr] = value

    def _root(self, node: ast.expr, names: Mapping[str, Any]) -> Built | None:
        """Return the object in whose attribute, or its attribute's, an expression is."""
        name = dotted(node).partition(".")[0]
        value = names.get(name, self.names.get(name))
        return value if isinstance(value, Built) else None

    def _place(self, node: ast.expr, names: Mapping[str, Any]) -> Built:
        """Return the object under a dotted name whose first part is an object, with what is missing on the way."""
        if not isinstance(node, ast.Attribute):
            value = self._root(node, names)
            assert value is not None
            return value
        place = self._place(node.value, names)
        inside = place.named.get(node.attr)
        if not isinstance(inside, Built):
            inside = place.named[node.attr] = Built(dotted(node), is_place=True)
        return inside

    # -- expressions --------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        """Return the value of an expression."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise InputError(f"the file takes more than {MAX_STEPS:,} steps to follow")
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item, names) for item in items]
            case ast.Name(id=name):
                return names.get(name, self.names.get(name, Unknown(name, is_name=name in self.imports)))
            case ast.Attribute(value=inner, attr=key):
                return self._attribute(node, self.value(inner, names), key, names)
            case ast.UnaryOp(op=ast.USub() | ast.Not() as sign, operand=operand):
                value = self.value(operand, names)
                if isinstance(sign, ast.Not) and _is_plain(value):
                    return not value
                if isinstance(sign, ast.USub) and isinstance(value, int | float):
                    return -value
            case ast.BinOp():
                return self._computed(node, names)
            case ast.BoolOp(op=joint, values=parts):
                return self._joined(node, [self.value(part, names) for part in parts], isinstance(joint, ast.Or))
            case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in _COMPARES:
                a, b = self.value(left, names), self.value(right, names)
                if _is_plain(b) and (_is_plain(a) or (b is None and isinstance(a, list))):
                    return _COMPARES[type(sign)](a, b)
            case ast.Subscript(value=inner, slice=index):
                table, key = self.value(inner, names), _key(self.value(index, names))
                if isinstance(table, dict | list) and (key in table if isinstance(table, dict) else _fits(table, key)):
                    return table[key]
            case ast.Dict(keys=keys, values=items) if all(keys):
                plain_keys = [_key(self.value(key, names)) for key in keys if key]
                if all(isinstance(key, tuple) or _is_plain(key) for key in plain_keys):
                    return dict(zip(plain_keys, (self.value(item, names) for item in items), strict=True))
            case ast.ListComp(elt=item, generators=[ast.comprehension(target=ast.Name(id=name), iter=every, ifs=[])]):
                if isinstance(values := self.value(every, names), list):
                    return [self.value(item, {**names, name: value}) for value in values]
            case ast.IfExp(test=test, body=branch, orelse=other) if _is_plain(holds := self.value(test, names)):
                return self.value(branch if holds else other, names)
            case ast.Call():
                return self._called(node, names)
        return Unknown(_source(node))

    def _attribute(self, node: ast.expr, place: Any, key: str, names: Mapping[str, Any]) -> Any:
        if isinstance(place, Built):
            if key not in place.named and self._root(node, names):
                return self._place(node, names)
            return place.named.get(key, Unknown(_source(node)))
        return Unknown(_source(node), is_name=isinstance(place, Unknown) and place.is_name)

    def _joined(self, node: ast.expr, values: list[Any], is_or: bool) -> Any:
        """Return the value of parts joined by "or" or "and": the first that decides, the last where none does."""
        for value in values:
            if not _is_plain(value):
                return Unknown(_source(node))
            if bool(value) is is_or:
                return value
        return values[-1]

    def _computed(self, node: ast.BinOp, names: Mapping[str, Any]) -> Any:
        left, right = self.value(node.left, names), self.value(node.right, names)
        unknown = Unknown(_source(node))
        if type(node.op) not in _COMPUTES or any(isinstance(item, str | bool) for item in (left, right)):
            return unknown
        for a, b in ((left, right), (right, left)):
            if isinstance(a, int | float) and not abs(a) < MAX_NUMBER:
                return unknown
            if isinstance(a, list) and len(a) * (b if isinstance(b, int) else 1) > MAX_ITEMS:
                return unknown
        try:
            return _COMPUTES[type(node.op)](left, right)
        except (TypeError, ZeroDivisionError):
            return unknown

    def _called(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        words = [self.value(item, names) for item in node.args]
        named: dict[str, Any] = {}
        for item in node.keywords:
            value = self.value(item.value, names)
            named |= {item.arg: value} if item.arg else arguments_in(value)
        place = self.value(node.func.value, names) if isinstance(node.func, ast.Attribute) else None
        if isinstance(node.func, ast.Attribute) and isinstance(place, Built):
            is_fresh, method = isinstance(node.func.value, ast.Call), node.func.attr
            if method == "convert" and words and isinstance(words[0], Built):
                changed = words[0].copy()
                changed.converters.append(place)
                return changed
            if is_fresh or method == "build" or method.startswith("to_"):
                return place
        name = dotted(node.func) or _source(node.func)
        if name in self.functions:
            return self.call(name, words, named)
        if name in ("list", "tuple") and len(words) == 1 and isinstance(words[0], list):
            return list(words[0])
        first, dot, attributes = name.partition(".")
        full = self.imports.get(first, first) + dot + attributes
        if full == "dataclasses.replace" and words and isinstance(words[0], Built):
            changed = words[0].copy()
            changed.named |= named
            return changed
        return Built(full, words, named)


def arguments_in(value: Any) -> dict[str, Any]:
    """Return the arguments in a table that a call takes with two stars; one that is not known has the name "**"."""
    if isinstance(value, Built) and value.name == "dict":
        return value.named
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else {"**": value}


def _key(value: Any) -> Any:
    """Return a value as a key of a table: a list of plain ones as a tuple, another as what no table holds."""
    if isinstance(value, list) and all(map(_is_plain, value)):
        return tuple(value)
    return value if _is_plain(value) else object()


def _fits(items: list[Any], index: Any) -> bool:
    return isinstance(index, int) and -len(items) <= index < len(items)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def parsed(text: str, title: str) -> ast.Module:
    """Return the syntax tree of a program; a whole number too long to be printed is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the person's own program
            tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value.bit_length() > MAX_BITS:
                raise InputError(f"{title}: a number of {node.value.bit_length()} bits (line {node.lineno})")
    except SyntaxError as error:
        raise InputError(f"{title}: not valid Python: {error.msg} (line {error.lineno})") from None
    except (RecursionError, MemoryError, ValueError):
        raise InputError(f"{title}: not valid Python, or nested too deeply") from None
    return tree


def _source(node: ast.AST) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:
        raise InputError("nested too deeply") from None
