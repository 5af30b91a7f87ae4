"""Reader of recipes of Megatron-Bridge: Python files that assign attributes, and command lines of overrides.

A file is parsed, never imported or run: assignments of literals to attributes of the configuration are followed in
their order, through functions of the same file.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Given, Launch, Reader, Unread
from autoplan.frameworks.common.literals import COMPUTES, MOST_CHARACTERS, parse_python
from autoplan.frameworks.common.shell import read_script
from autoplan.frameworks.megatron_lm.arguments import Argument, Arguments, typed
from autoplan.frameworks.megatron_lm.known_models import preset_of
from autoplan.frameworks.megatron_lm.launch import launch_of
from autoplan.frameworks.megatron_lm.options import BRIDGE_FIELDS
from autoplan.frameworks.megatron_lm.read import num_devices, started
from autoplan.spec.model import ModelSpec

ENTRIES = ("run_recipe.py",)
MOST_DEPTH = 20
MOST_CALLS = 200

# What `_pretrain_common` of its recipes sets (067f987) and Megatron-LM's defaults do not.
_COMMON = {
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "seq_length": 4096,
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
}
_SHORT = {
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "vp": "model.virtual_pipeline_model_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "etp": "model.expert_tensor_parallel_size",
    "gb": "train.global_batch_size",
    "mb": "train.micro_batch_size",
    "sl": "dataset.seq_length",
    "ms": "train.train_iters",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "seq_length": "dataset.seq_length",
    "max_steps": "train.train_iters",
} | {
    name: f"model.{name}"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
}
# Registered precisions by the parts of their names (training/mixed_precision.py).
_PRECISIONS = (
    ("mxfp8", {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    ("nvfp4", {"fp4": "e2m1"}),
    ("fp8_current", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    ("fp8_delayed", {"fp8": "hybrid", "fp8_recipe": "delayed"}),
    ("fp8_subchannel", {"fp8": "hybrid", "fp8_recipe": "blockwise"}),
)
_ARGUMENTS = {path: name for name, path in BRIDGE_FIELDS.items()} | {
    "model.virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "model.padded_vocab_size": "padded_vocab_size",
}
# What functions make, and is known by their names.
_MADE = ("model", "mixed_precision", "comm_overlap", "model.transformer_layer_spec")
# Sections whose fields change neither time nor memory, but for those that have a name of their own above.
_HARMLESS = ("checkpoint", "logger", "rng", "scheduler", "tokenizer", "validation", "dataset", "profiling", "env_vars")


def recognises(name: str, text: str) -> bool:
    """Return whether a file looks like a recipe of Megatron-Bridge, or starts one."""
    return "megatron.bridge" in text or any(entry in text for entry in ENTRIES)


def read(text: str, given: Given) -> Launch:
    """The launch that a recipe or the command line of one describes; a recipe does not hold the number of devices."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(f"a recipe is at most {MOST_CHARACTERS:,} characters long")
    devices = None
    recipe = _Recipe()
    if any(entry in text for entry in ENTRIES) and not re.search(r"(?m)^\s*(import|from)\s+megatron", text):
        script = read_script(text, given.variables)
        before, words = started(script, ENTRIES, given)
        if words is None:
            raise InputError("no command of the script starts run_recipe.py")
        devices = num_devices(before, script, text)
        _overrides(words, recipe)
    else:
        _python(text, given, recipe)
    return _launch(recipe, given, devices)


@dataclass(slots=True)
class _Recipe:
    """Values by their paths in the configuration, the names that the model may have, and what was not followed."""

    values: dict[str, Any] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)


# -- command lines ----------------------------------------------------------------------------------------------------


def _overrides(words: tuple[str, ...], recipe: _Recipe) -> None:
    at = 0
    late: dict[str, Any] = {}  # settings by path win over the short ones
    while at < len(words):
        word = words[at]
        at += 1
        name, sign, value = word.partition("=")
        if word.startswith("-"):
            option = name.lstrip("-").replace("-", "_")
            if not sign and at < len(words) and not words[at].startswith("-") and "=" not in words[at]:
                value, at = words[at], at + 1
            if option in ("recipe", "model"):
                recipe.models.append(_stem(value))
                recipe.unread.append(
                    Unread(option=word, value=value, why="what the recipe itself sets is not in the file")
                )
            elif option in _SHORT:
                recipe.values[_SHORT[option]] = _literal_word(value)
            else:
                matters = option not in ("mode", "dataset", "dry_run", "step_func", "lr", "min_lr", "warmup_iters")
                recipe.unread.append(Unread(option=word, value=value, why="not known here", matters=matters))
        elif sign:
            late[name.lstrip("+~")] = _literal_word(value)
        else:
            recipe.unread.append(Unread(option=word, value="", why="not known here"))
    recipe.values |= late


def _literal_word(word: str) -> Any:
    plain = {"true": True, "false": False, "null": None, "none": None}
    if word.casefold() in plain:
        return plain[word.casefold()]
    if word[:1] in "[(\"'":
        try:
            return ast.literal_eval(word[:4000])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return word
    return typed(word)


def _stem(recipe: str) -> str:
    """Return a recipe's name without task, devices and precision."""
    return re.split(r"_(?:pretrain|sft|peft|lora|dora|finetune|config)", recipe)[0]


# -- Python files -----------------------------------------------------------------------------------------------------


class _Unknown(Exception):  # noqa: N818
    """An expression that is no literal."""


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    words: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]


def _python(text: str, given: Given, recipe: _Recipe) -> None:
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"not Python: {' '.join(str(error).split())[:120]}") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    setting = [name for name, node in functions.items() if any(_targets(node))]
    called = {
        node.func.id
        for item in setting
        for node in ast.walk(functions[item])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    wanted = dict(given.variables).get("RECIPE")
    chosen = [wanted] if wanted else [name for name in setting if name not in called]
    if wanted is not None and wanted not in functions:
        raise InputError(f"the file has no function {wanted[:60]!r}: it has {', '.join(setting)[:200]}")
    if len(chosen) > 1:
        raise InputError(f"which recipe?  pass --set RECIPE=NAME, one of {', '.join(chosen)[:300]}")
    scope = _Scope(functions, recipe)
    scope.run(tree.body, scope.constants, 0)
    if chosen:
        recipe.models.append(_stem(chosen[0]))
        scope.call(functions[chosen[0]], {}, 0)
    if not recipe.values:
        raise InputError("no function of the file assigns attributes of a configuration")


def _targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes of attributes that a function assigns: `cfg.model.x`."""
    for item in ast.walk(node):
        if isinstance(item, ast.Assign):
            for target in item.targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute):
                    yield target


class _Scope:
    """Follows the statements of functions in their order."""

    def __init__(self, functions: dict[str, ast.FunctionDef], recipe: _Recipe) -> None:
        self.functions = functions
        self.recipe = recipe
        self.constants: dict[str, Any] = {}
        self.calls = 0

    def call(self, function: ast.FunctionDef, given: dict[str, Any], depth: int) -> None:
        self.calls += 1
        if depth > MOST_DEPTH or self.calls > MOST_CALLS:
            raise InputError(f"functions of the recipe call one another more than {MOST_DEPTH} deep or too often")
        names = dict(self.constants)
        places = [*function.args.posonlyargs, *function.args.args]
        defaults = list(zip(places[::-1], function.args.defaults[::-1], strict=False))
        defaults += [
            (place, item)
            for place, item in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if item is not None
        ]
        for place, default in defaults:
            try:
                names[place.arg] = self.value(default, names, 0)
            except _Unknown:
                names.pop(place.arg, None)
        for name, value in given.items():
            if not name.isdigit():
                names[name] = value
            elif int(name) < len(places):
                names[places[int(name)].arg] = value
        self.run(function.body, names, depth)

    def run(self, body: list[ast.stmt], names: dict[str, Any], depth: int) -> None:
        for node in body:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self.assign(target, node.value, names, depth)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self.assign(node.target, node.value, names, depth)
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                self.enter(node.value, names, depth)
            elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)) and any(_targets(node)):
                text = ast.unparse(node).splitlines()[0][:60]
                self.recipe.unread.append(Unread(option=text, value="", why="only running the file decides it"))

    def enter(self, node: ast.Call, names: dict[str, Any], depth: int) -> bool:
        """Follows a function of the file; names the base of a recipe of another."""
        name = _dotted(node.func)
        if name in self.functions:
            given = {}
            said = [(str(at), item) for at, item in enumerate(node.args)]
            for key, word in [*said, *((item.arg or "", item.value) for item in node.keywords)]:
                try:
                    given[key] = self.value(word, names, 0)
                except _Unknown:
                    continue
            self.call(self.functions[name], given, depth + 1)
            return True
        if name.endswith("_config") and not name.endswith("_precision_config"):
            self.recipe.models.append(_stem(name))
            why = "a recipe of another file, whose settings are not read"
            self.recipe.unread.append(Unread(option=name, value="", why=why))
            return True
        return False

    def assign(self, target: ast.expr, node: ast.expr, names: dict[str, Any], depth: int) -> None:
        if isinstance(target, ast.Name):
            if not (isinstance(node, ast.Call) and self.enter(node, names, depth)):
                try:
                    names[target.id] = self.value(node, names, 0)
                except _Unknown:
                    names.pop(target.id, None)
                else:
                    if isinstance(names[target.id], _Call) and names[target.id].name == "ConfigContainer":
                        self.store("", names[target.id])
            return
        path = _dotted(target).partition(".")[2]
        if not path:
            return
        try:
            self.store(path, self.value(node, names, 0))
        except _Unknown:
            matters = path.partition(".")[0] not in _HARMLESS or path == "dataset.seq_length"
            why = "only running the file would tell"
            self.recipe.unread.append(Unread(option=path, value=ast.unparse(node)[:60], why=why, matters=matters))

    def store(self, path: str, value: Any) -> None:
        """Keeps a value; the words of a call are fields of what it makes."""
        if not isinstance(value, _Call):
            self.recipe.values[path] = value
            return
        if not value.name[:1].isupper() and path not in _MADE:
            why = "only running the file would tell"
            self.recipe.unread.append(Unread(option=path, value=f"{value.name}(...)", why=why))
            return
        if path == "model":  # a new model has no settings yet
            self.recipe.values = {
                item: held for item, held in self.recipe.values.items() if not item.startswith("model.")
            }
        self.recipe.models += [str(word) for word in value.words if isinstance(word, str)] if path == "model" else []
        self.recipe.values[path] = value.words[0] if value.words and path != "model" else value.name
        for name, word in value.named:
            self.store(f"{path}.{name}" if path else name, word)

    def value(self, node: ast.expr, names: dict[str, Any], depth: int) -> Any:
        """A literal, a dotted name, or a call of one."""
        if depth > MOST_DEPTH:
            raise _Unknown
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, (bool, int, float, str)):
                return value
            case ast.Name(id=name):
                if name in names:
                    return names[name]
                raise _Unknown
            case ast.Attribute():
                return _dotted(node)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item, names, depth + 1) for item in items]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self.value(operand, names, depth + 1)
                if isinstance(number, (int, float)):
                    return -number
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in COMPUTES:
                return self.computed(type(sign), *(self.value(item, names, depth + 1) for item in (left, right)))
            case ast.Call(func=function, args=words, keywords=named):
                return self.made(function, words, named, names, depth)
        raise _Unknown

    def computed(self, sign: type[ast.operator], left: Any, right: Any) -> Any:
        sizes = [
            len(item) if isinstance(item, (list, str)) else abs(item) for item in (left, right) if item is not None
        ]
        if any(isinstance(item, (bool, float, str, _Call)) for item in (left, right)) or max(sizes, default=0) > 10**6:
            raise _Unknown
        if sign is ast.Mult and any(isinstance(item, list) for item in (left, right)) and sizes[0] * sizes[1] > 10**5:
            raise _Unknown
        try:
            return COMPUTES[sign](left, right)
        except (TypeError, ZeroDivisionError):
            raise _Unknown from None

    def made(
        self, function: ast.expr, words: list[ast.expr], named: list[ast.keyword], names: dict[str, Any], depth: int
    ) -> _Call:
        inner = function.value if isinstance(function, ast.Attribute) else None
        if isinstance(inner, ast.Call):  # AutoBridge.from_hf_pretrained(...).to_megatron_provider()
            made = self.value(inner, names, depth + 1)
            if isinstance(made, _Call):
                return made
        return _Call(
            _dotted(function).rpartition(".")[2],
            tuple(self.known(item, names, depth) for item in words),
            tuple((item.arg, self.known(item.value, names, depth)) for item in named if item.arg),
        )

    def known(self, node: ast.expr, names: dict[str, Any], depth: int) -> Any:
        try:
            return self.value(node, names, depth + 1)
        except _Unknown:
            return f"${{{ast.unparse(node)[:60]}}}"  # as readers of shell scripts keep what is not set


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


# -- settings ---------------------------------------------------------------------------------------------------------


def _launch(recipe: _Recipe, given: Given, devices: int | None) -> Launch:
    made = recipe.values.pop("model", None)
    own = made in ("GPTModelProvider", "MLAModelProvider")
    base: ModelSpec | None = None if own else preset_of(*reversed(recipe.models))
    if not own and base is None and given.model is None and "model.num_layers" not in recipe.values:
        names = ", ".join(dict.fromkeys(recipe.models))[:80]
        raise InputError(f"the model of the recipe ({names or 'no name'}) is not known here: pass --model")
    written = [argument for path, value in recipe.values.items() for argument in _arguments(path, value)]
    defaults = _COMMON | ({} if own else {"hidden_dropout": 0.0, "attention_dropout": 0.0})
    arguments = Arguments(written, defaults)
    if arguments.count("expert_model_parallel_size", 1) > 1:
        arguments.defaults["expert_tensor_parallel_size"] = 1
    arguments.remarks += recipe.unread
    # As the framework's recipes have it, and as it is priced.
    arguments.understood |= {
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        "activation_func",
        "should_pad_vocab",
    }
    arguments.understood |= {"transformer_layer_spec", "transformer_layer_spec.use_transformer_engine"}
    arguments.understood |= {"comm_overlap", "mixed_precision", "pipeline_dtype", "average_in_collective"}
    if arguments.given.get("grad_reduce_in_fp32") and arguments.flag("grad_reduce_in_fp32"):
        arguments.remark("grad_reduce_in_fp32", "priced as reducing gradients in 16 bits")
    for name, item in arguments.given.items():
        if name not in arguments.understood and item.option.partition(".")[0] in _HARMLESS and name == item.option:
            arguments.remark(name, "costs neither time nor memory of a step", matters=False)
    return launch_of(arguments, given, target="megatron-bridge", framework="nemo", num_devices=devices, base=base)


def _arguments(path: str, value: Any) -> Iterator[Argument]:
    """The settings that a field of the configuration means, by Megatron-LM's names."""
    text = str(value)
    path = path.replace("model.transformer.", "model.")
    if path == "mixed_precision":
        name = text.replace("-", "_")
        yield Argument(path, text, "mixed_precision", text)
        is_half = name.startswith("fp16")
        yield Argument(path, text, "bf16", not is_half)
        yield Argument(path, text, "fp16", is_half)
        for part, means in _PRECISIONS:
            if part in name:
                for argument, word in means.items():
                    yield Argument(path, text, argument, word)
        return
    if value is None or path == "model.seq_length":  # the data set's is the one that counts
        return
    section, _, name = path.partition(".")
    if path == "model.share_embeddings_and_output_weights":
        yield Argument(path, text, "untie_embeddings_and_output_weights", not value)
    elif path in _ARGUMENTS:
        yield Argument(path, text, _ARGUMENTS[path], value)
    elif name and section in ("comm_overlap", "mixed_precision", "model", "optimizer", "train", "ddp", "dist"):
        yield Argument(path, text, name, value)
    else:
        yield Argument(path, text, path, value)


READER = Reader(target="megatron-bridge", recognises=recognises, read=read)
