"""Calls of a Python program with the values of their arguments, found without running it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.literals import Built, Module, dotted, parsed
from autoplan.frameworks.common.options import Unknown, typed

_MAGIC = re.compile(r"^([ \t]*)[!%].*$", re.MULTILINE)
_HOLDS = re.compile(r"(.*\.)?(cuda\.is_available|is_bf16_supported|is_bfloat16_supported|is_torch_bf16_gpu_available)")
_ENVIRONMENT = ("os.getenv", "os.environ.get", "environ.get", "getenv")
_CONVERTS = ("int", "float", "str")
_OF_USER = re.compile(
    r"\w*(args|arguments|opts?|flags|cfg|config)", re.IGNORECASE
)  # names of a program's own arguments


def source_of(text: str) -> str:
    """Return the Python of a file: its text, or the code of a notebook without its magic commands."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        cells = json.loads(text)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text
    return _MAGIC.sub(r"\1pass", "\n".join(code))


def calls_of(source: str, variables: Mapping[str, str]) -> Iterator[Built]:
    """Yield all calls of a program, whatever function they are in.

    What `variables` state has that value: names, variables of the environment, and the program's own arguments, which
    else have their defaults.  A name has a value where all its assignments give it the same one.  Attributes that are
    set on the result of a call count as its arguments.
    """
    tree = _Known(variables, parsed(source, "the file")).known()
    module = Module(ast.unparse(tree), "the file")
    assigned: dict[str, list[ast.expr]] = {}
    later: dict[str, dict[str, ast.expr]] = {}  # attributes that are set on what a name stands for
    for node in ast.walk(tree):
        for target, value in _assignments(node):
            if isinstance(target, ast.Name):
                assigned.setdefault(target.id, []).append(value)
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                later.setdefault(target.value.id, {})[target.attr] = value
    bound = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names: dict[str, Any] = {name: Unknown(name) for name in bound}
    for name, expressions in assigned.items():
        values = [module.value(expression, names) for expression in expressions]
        if all(value == values[0] for value in values):
            names[name] = values[0]
    names_of = {id(expression): name for name, expressions in assigned.items() for expression in expressions}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = [module.value(item, names) for item in node.args]
            named: dict[str, Any] = {}
            for item in node.keywords:
                value = module.value(item.value, names)
                named |= {item.arg: value} if item.arg else _fields(value)
            for attribute, expression in later.get(names_of.get(id(node), ""), {}).items():
                named[attribute] = module.value(expression, names)
            first, dot, rest = dotted(node.func).partition(".")
            yield Built(module.imports.get(first, first) + dot + rest, words, named)


def stated(text: str) -> Any:
    """Return the value of a variable that a user states: a switch, a number, a list of names or a word."""
    if "," in text:
        return [stated(part.strip()) for part in text.split(",") if part.strip()]
    return {"true": True, "false": False}.get(text.casefold(), typed(text))


def _assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) of the assignments in a statement."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    return [(node.target, node.value)] if isinstance(node, ast.AnnAssign) and node.value is not None else []


def _fields(value: Any) -> dict[str, Any]:
    """Return the arguments in a table that a call takes with two stars."""
    if isinstance(value, Built) and value.name == "dict":
        return value.named
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else {"**": value}


class _Known(ast.NodeTransformer):
    """Replaces what is known by constants: what the user states, and defaults of environment and arguments."""

    def __init__(self, variables: Mapping[str, str], tree: ast.Module) -> None:
        self.tree, self.variables = tree, variables
        self.defaults: dict[str, Any] = {}  # of the program's own arguments: of argparse, and fields of dataclasses
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func).endswith(".add_argument"):
                self._add(node)
            elif isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        default = field.value
                        if isinstance(default, ast.Call) and dotted(default.func).endswith("field"):
                            default = next((item.value for item in default.keywords if item.arg == "default"), None)
                        self._default(field.target.id, default)

    def known(self) -> ast.Module:
        """Return the program with the known values."""
        try:
            return ast.fix_missing_locations(self.visit(self.tree))
        except RecursionError:
            raise InputError("the file: nested too deeply") from None

    def _add(self, node: ast.Call) -> None:
        """Record the default of an argument of argparse."""
        named = {item.arg: item.value for item in node.keywords}
        words = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        name = next((word for word in words if word.startswith("--")), "").lstrip("-").replace("-", "_")
        action = named.get("action")
        is_switch = isinstance(action, ast.Constant) and action.value == "store_true"
        self._default(name, ast.Constant(value=False) if is_switch else named.get("default"))

    def _default(self, name: str, default: ast.expr | None) -> None:
        if isinstance(default, ast.Constant):
            self.defaults[name] = default.value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_stated = isinstance(node.ctx, ast.Load) and node.id in self.variables
        return _expression(stated(self.variables[node.id])) if is_stated else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name) and _OF_USER.fullmatch(node.value.id):
            if node.attr in self.variables:
                return _expression(stated(self.variables[node.attr]))
            if node.attr in self.defaults:
                return ast.Constant(self.defaults[node.attr])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name, words = dotted(node.func), [item.value for item in node.args if isinstance(item, ast.Constant)]
        if _HOLDS.fullmatch(name):
            return ast.Constant(value=True)
        if name in _ENVIRONMENT and words and isinstance(words[0], str):
            if words[0] in self.variables:
                return _expression(stated(self.variables[words[0]]))
            return ast.Constant(words[1]) if len(words) > 1 else node
        if name in _CONVERTS and len(words) == len(node.args) == 1:
            return ast.Constant(str(words[0]) if name == "str" else typed(str(words[0])))
        return node


def _expression(value: Any) -> ast.expr:
    return (
        ast.List([ast.Constant(item) for item in value], ast.Load()) if isinstance(value, list) else ast.Constant(value)
    )
