"""Arguments of a Python program: their defaults, and the objects that have them, found without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from autoplan.frameworks.common.literals import dotted

# Calls that parse a command line or a file of settings, of argparse, transformers, TRL, tyro and simple_parsing.
_PARSES = re.compile(
    r"(.*\.)?parse_((known_|intermixed_|known_intermixed_)?args(_\w+)?|(yaml|json)_file|dict)"
    r"|.*parser\.parse|tyro\.cli|simple_parsing\.parse"
)
_RUNS = re.compile(r"(.*\.)?Fire|typer\.run")  # calls that take the parameters of a function for arguments
MAX_ROUNDS = 10  # in which an object of arguments is handed on


@dataclass(slots=True)
class ProgramArguments:
    """Defaults by name, parameters that are arguments, and the dotted names of the objects that have them.

    Arguments of one name whose defaults differ have none.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, ast.expr] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    _differ: set[str] = field(default_factory=set)

    def add(self, name: str, default: ast.expr | None) -> None:
        """Record the default of an argument, where it is a constant or a list of constants."""
        try:
            value = ast.literal_eval(default) if default is not None else None
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = None
        if value is None or name in self._differ:
            return
        if self.defaults.setdefault(name, value) != value:
            self._differ.add(name)
            del self.defaults[name]


def arguments_of(tree: ast.Module) -> ProgramArguments:
    """Return the arguments of a program: of argparse, fields of classes, parameters of a function that is run."""
    result = ProgramArguments()
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if dotted(node.func).endswith(".add_argument"):
                _add_argument(result, node)
            elif _RUNS.fullmatch(dotted(node.func)) and node.args and dotted(node.args[0]) in functions:
                _add_parameters(result, functions[dotted(node.args[0])].args)
        elif isinstance(node, ast.ClassDef) and (fields := dict(_fields(node))):
            result.objects.add(node.name)
            for name, default in fields.items():
                result.add(name, default)
    _follow(tree, functions, result.objects)
    return result


def assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) of the assignments in a statement."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    return [(node.target, node.value)] if isinstance(node, ast.AnnAssign) and node.value is not None else []


def _add_argument(result: ProgramArguments, node: ast.Call) -> None:
    named = {item.arg: item.value for item in node.keywords}
    words = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    name = next((word for word in words if word.startswith("--")), "").lstrip("-").replace("-", "_")
    if isinstance(dest := named.get("dest"), ast.Constant):
        name = str(dest.value)
    action = getattr(named.get("action"), "value", None)
    off = {"store_true": False, "store_false": True}
    result.add(name, named.get("default", ast.Constant(off[action]) if action in off else None))


def _add_parameters(result: ProgramArguments, signature: ast.arguments) -> None:
    places = [*signature.posonlyargs, *signature.args]
    result.parameters |= {
        arg.arg: default for arg, default in zip(places[::-1], signature.defaults[::-1], strict=False)
    }
    result.parameters |= {
        arg.arg: default
        for arg, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
        if default is not None
    }


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield (name, default) of the fields of a class; a class without annotations has them if it has no base."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            default = item.value
            if isinstance(default, ast.Call) and dotted(default.func).endswith("field"):
                named = {word.arg: word.value for word in default.keywords}
                default = named.get("default")
                if isinstance(factory := named.get("default_factory"), ast.Lambda):
                    default = factory.body
            yield item.target.id, default
        elif isinstance(item, ast.Assign) and not node.bases:
            yield from ((target.id, item.value) for target in item.targets if isinstance(target, ast.Name))


def _follow(tree: ast.Module, functions: dict[str, ast.FunctionDef], objects: set[str]) -> None:
    """Add the names of all objects of arguments: assigned, returned by a function, or handed to one."""
    givers: set[str] = set()
    classes = frozenset(objects)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.Call)]
    results = {
        name: [item.value for item in ast.walk(function) if isinstance(item, ast.Return) and item.value]
        for name, function in functions.items()
    }
    for function in functions.values():
        annotated = ((arg.arg, arg.annotation) for arg in (*function.args.args, *function.args.kwonlyargs))
        objects.update(name for name, annotation in annotated if annotation and dotted(annotation) in classes)

    def gives(value: ast.expr) -> bool:
        if isinstance(value, ast.Call):
            name = dotted(value.func)
            return _PARSES.fullmatch(name) is not None or name in givers or name in classes
        return dotted(value) in objects

    for _ in range(MAX_ROUNDS):
        num_known = len(objects) + len(givers)
        givers.update(name for name, values in results.items() if any(map(gives, values)))
        for node in nodes:
            for target, value in assignments(node):
                if gives(value):
                    objects.update(_names(target))
            if isinstance(node, ast.Call) and (called := functions.get(dotted(node.func))):
                places = zip(called.args.args, node.args, strict=False)
                objects.update(arg.arg for arg, value in places if gives(value))
                objects.update(item.arg for item in node.keywords if item.arg and gives(item.value))
        if len(objects) + len(givers) == num_known:
            return


def _names(target: ast.expr) -> Iterator[str]:
    """Yield the dotted names that an assignment sets."""
    if isinstance(target, ast.Tuple | ast.List):
        for item in target.elts:
            yield from _names(item)
    elif isinstance(target, ast.Starred):
        yield from _names(target.value)
    elif name := dotted(target):
        yield name
