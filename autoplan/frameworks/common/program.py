"""Calls of a Python program with the values of their arguments, found without running it."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.literals import Built, Module, arguments_in, dotted, parsed
from autoplan.frameworks.common.options import Unknown, typed
from autoplan.frameworks.common.program_arguments import ProgramArguments, arguments_of, assignments

_MAGIC = re.compile(r"^([ \t]*)[!%].*$", re.MULTILINE)
_HOLDS = re.compile(r"(.*\.)?(cuda\.is_available|is_bf16_supported|is_bfloat16_supported|is_torch_bf16_gpu_available)")
_ENVIRONMENT = ("os.getenv", "os.environ.get", "environ.get", "getenv")
# Variables that a launcher sets, whatever default a program has for them.
_OF_LAUNCHER = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
_CONVERTS = ("int", "float", "str")
MAX_ROUNDS = 5  # in which names are found whose values decide which other assignments run


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


def calls_of(
    source: str, variables: Mapping[str, str], unknown: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Iterator[Built]:
    """Yield all calls of a program that it may make, whatever function they are in.

    What `variables` state has that value: names, variables of the environment, and the program's own arguments, which
    else have their defaults (those in the file before further `defaults`), but for `unknown` ones.  A name has a value
    where all its assignments give it the same one.  Attributes that are set on the result of a call count as its
    arguments; those that are set on the arguments themselves are yielded as a call without a name.
    """
    program = parsed(source, "the file")
    arguments = arguments_of(program)
    defaults = {**(defaults or {}), **arguments.defaults}
    known = _Known(variables, {name: value for name, value in defaults.items() if name not in unknown})
    tree = known.in_program(program, arguments.objects)
    module = Module(ast.unparse(tree), "the file")
    names: dict[str, Any] = {}
    for _ in range(MAX_ROUNDS):
        module.steps = 0
        live = list(_live(tree, module, names))
        before, names = names, _names(live, arguments, module, variables, unknown)
        if names == before:
            break
    later: dict[str, dict[str, ast.expr]] = {}  # attributes that are set on what a name stands for
    names_of: dict[int, str] = {}
    for node, _ in live:
        for target, value in assignments(node):
            if isinstance(target, ast.Name):
                names_of[id(value)] = target.id
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                later.setdefault(target.value.id, {})[target.attr] = value
    for node, condition in live:
        for target, value in assignments(node):
            if isinstance(target, ast.Attribute) and dotted(target.value) in arguments.objects:
                yield Built("", [], {target.attr: module.value(value, names)}, condition=condition)
        if isinstance(node, ast.Call):
            words = [module.value(item, names) for item in node.args]
            named: dict[str, Any] = {}
            for item in node.keywords:
                value = module.value(item.value, names)
                named |= {item.arg: value} if item.arg else arguments_in(value)
            for attribute, expression in later.get(names_of.get(id(node), ""), {}).items():
                named[attribute] = module.value(expression, names)
            first, dot, rest = dotted(node.func).partition(".")
            full = module.imports.get(first, first) + dot + rest
            yield Built(full, words, named, condition=condition)


def stated(text: str) -> Any:
    """Return the value of a variable that a user states: a switch, a number, a list of names or a word."""
    if "," in text:
        return [stated(part.strip()) for part in text.split(",") if part.strip()]
    return {"true": True, "false": False}.get(text.casefold(), typed(text))


def _live(tree: ast.Module, module: Module, names: Mapping[str, Any]) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node, condition that is not known) of the parts of a program that it may run."""
    waiting: list[tuple[ast.AST, str]] = [(tree, "")]
    while waiting:
        node, condition = waiting.pop()
        yield node, condition
        if isinstance(node, ast.If) and not ast.unparse(node.test).startswith("__name__"):
            holds = module.value(node.test, names)
            is_open = isinstance(holds, Unknown | Built)
            inner = ast.unparse(node.test)[:60] if is_open else condition
            parts = [*(node.body if is_open or holds else ()), *(node.orelse if is_open or not holds else ())]
            waiting += ((part, inner) for part in reversed(parts))
            waiting.append((node.test, condition))
        else:
            waiting += ((child, condition) for child in reversed(list(ast.iter_child_nodes(node))))


def _names(
    live: Sequence[tuple[ast.AST, str]],
    arguments: ProgramArguments,
    module: Module,
    variables: Mapping[str, str],
    unknown: Collection[str],
) -> dict[str, Any]:
    """Return the values of names: unknown where assignments give several, or something else sets them too."""
    assigned: dict[str, list[ast.expr]] = {}
    for name, default in arguments.parameters.items():
        assigned[name] = [] if name in unknown else [default]
    num_set = Counter(assigned.keys())
    for node, _ in live:
        for target, value in assignments(node):
            if isinstance(target, ast.Name):
                assigned.setdefault(target.id, []).append(value)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            num_set[node.id] += 1
    names: dict[str, Any] = {name: Unknown(name) for name in num_set}
    for name, expressions in assigned.items():
        values = [module.value(expression, names) for expression in expressions]
        if values and len(values) == num_set[name] and all(value == values[0] for value in values):
            names[name] = values[0]
    return names


class _Known(ast.NodeTransformer):
    """Replaces what is known by constants: what the user states, and defaults of environment and arguments."""

    def __init__(self, variables: Mapping[str, str], defaults: Mapping[str, Any]) -> None:
        self.variables, self.defaults = variables, defaults
        self.objects: Collection[str] = ()  # that have the arguments
        self.modules: Collection[str] = ()

    def in_program(self, tree: ast.Module, objects: Collection[str]) -> ast.Module:
        """Return the program with the known values; `objects` have its arguments."""
        self.objects = objects
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        self.modules = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
        try:
            return ast.fix_missing_locations(self.visit(tree))
        except RecursionError:
            raise InputError("the file: nested too deeply") from None

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_stated = isinstance(node.ctx, ast.Load) and node.id in self.variables
        return _expression(stated(self.variables[node.id])) if is_stated else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and (owner := dotted(node.value)):
            if node.attr in self.variables and owner.partition(".")[0] not in self.modules:
                return _expression(stated(self.variables[node.attr]))
            if node.attr in self.defaults and owner in self.objects:
                return _expression(self.defaults[node.attr])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name, words = dotted(node.func), [item.value for item in node.args if isinstance(item, ast.Constant)]
        if _HOLDS.fullmatch(name):
            return ast.Constant(value=True)
        if name in _ENVIRONMENT and words and isinstance(words[0], str):
            if words[0] in self.variables:
                return _expression(stated(self.variables[words[0]]))
            return ast.Constant(words[1]) if len(words) > 1 and words[0] not in _OF_LAUNCHER else node
        if name in _CONVERTS and len(words) == len(node.args) == 1:
            return ast.Constant(str(words[0]) if name == "str" else typed(str(words[0])))
        return node


def _expression(value: Any) -> ast.expr:
    """Return the expression of a constant, or of a table or list of constants."""
    return ast.parse(repr(value), mode="eval").body
