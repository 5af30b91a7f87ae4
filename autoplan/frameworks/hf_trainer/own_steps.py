"""Statements of a Python program that change a step beside its arguments; they are listed, not read."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Silent, Unread
from autoplan.frameworks.common.literals import dotted, parsed
from autoplan.frameworks.common.media import OF_MEDIA, media_in

_OTHER_FILE = "another file of the program, which is not read"
_FROZEN = "weights that it freezes are priced as trained"
_KERNEL = "the kernel of attention is that of the arguments"
# (last part of the name of what is called, or the whole name; why it matters)
_CALLS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(names), why)
    for names, why in (
        (r"requires_grad_|freeze(?!_support)\w*", _FROZEN),
        (r"half|bfloat16", "weights are priced in the type in which they are loaded"),
        (r"compile", "priced as not compiled"),
        (
            r"FullyShardedDataParallel|FSDP|fully_shard|DistributedDataParallel|DDP|parallelize_module|DataParallel",
            "how it distributes the model itself is not read",
        ),
        (r"apply_liger_\w+|replace_\w*(attn|attention)\w*|\w*monkey_?patch\w*|patch_\w*model\w*", "priced without it"),
        (r"PeftModel\w*\.from_pretrained", "adapters that are loaded are not read: pass --finetune"),
        (r"(DeepSpeedCPU|FusedAdam|Adafactor|Lion|Muon|SGD|Adam\w*)", "priced with the optimizer of the arguments"),
    )
)
# Libraries that have functions of the same names: text, templates, and the collector of unused objects.
_OTHER_LIBRARIES = ("re", "regex", "pattern", "jinja2", "gc")
# (attribute that is set, why it matters)
_SET = {"requires_grad": _FROZEN, "_attn_implementation": _KERNEL, "attn_implementation": _KERNEL}
_METHODS = {
    "compute_loss": "a loss of its own is priced as that of transformers",
    "training_step": "a step of its own is priced as that of transformers",
    "create_optimizer": "an optimizer of its own is priced as that of the arguments",
    "get_train_dataloader": "batches of its own are priced as those of the arguments",
    "_get_train_sampler": "batches of its own are priced as those of the arguments",
}
# What of another file of the program decides about a step; the program itself is read for it.
_READ_IN_THE_PROGRAM = frozenset(
    (
        *("gradient_checkpointing", "gradient_checkpointing_enable", "gradient_checkpointing_kwargs", "LoraConfig"),
        *("get_peft_model", "BitsAndBytesConfig", "load_in_4bit", "load_in_8bit", "attn_implementation"),
    )
)
MAX_WORDS = 4  # of another file
MAX_FILES = 30  # of a program
MAX_LINES = 3  # of one kind of statement
_ADAPTERS = re.compile(r"\bget_peft_model\(|\bLoraConfig\(|\bpeft_config\b")


_Found = tuple[str, int, str]  # (option, line, why it matters)


def own_steps(tree: ast.Module, source: str, beside: Callable[[str], str | None]) -> Iterator[Unread]:
    """Yield what a program does that no argument says; `beside` finds the text of a module by its dotted name."""
    has_adapters = _ADAPTERS.search(source) is not None  # which freeze the other weights, as is priced
    lines: dict[tuple[str, str], list[int]] = {}
    for node in ast.walk(tree):
        for option, line, why in (*_called(node), *_assigned(node)):
            if not (has_adapters and why == _FROZEN):
                lines.setdefault((option, why), []).append(line)
        yield from _of_media(node)
        if isinstance(node, ast.ClassDef):
            yield from _overridden(node)
    yield from _of_other_files(tree, beside)
    for (option, why), found in lines.items():
        numbers = sorted(set(found))
        shown = ", ".join(map(str, numbers[:MAX_LINES])) + ", ..." * (len(numbers) > MAX_LINES)
        yield Unread(option=option, value=f"{'line' if len(numbers) == 1 else 'lines'} {shown}", why=why)


def _called(node: ast.AST) -> Iterator[_Found]:
    """Yield what a call of a function or method changes."""
    if not isinstance(node, ast.Call):
        return
    name = dotted(node.func)
    last = name.rpartition(".")[2]
    why = next((why for names, why in _CALLS if names.fullmatch(last) or names.fullmatch(name)), None)
    is_trained = why == _FROZEN and _is_true(node.args[:1])
    if why is not None and not is_trained and name.partition(".")[0] not in _OTHER_LIBRARIES:
        yield f"{last[-60:]}()", node.lineno, why
    if any(item.arg == "optimizers" for item in node.keywords):
        yield "optimizers", node.lineno, _METHODS["create_optimizer"]


def _assigned(node: ast.AST) -> Iterator[_Found]:
    """Yield what setting an attribute changes."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        name = target.attr if isinstance(target, ast.Attribute) else ""
        if (why := _SET.get(name)) is not None and not (why == _FROZEN and _is_true([node.value])):
            yield name, node.lineno, why


def _overridden(node: ast.ClassDef) -> Iterator[Unread]:
    """Yield the methods of a trainer that a class of the program replaces."""
    if any("Trainer" in dotted(base) for base in node.bases):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in _METHODS:
                yield Unread(option=f"{node.name[:40]}.{method.name}", value="", why=_METHODS[method.name])


def _is_true(values: list[ast.expr]) -> bool:
    return bool(values) and isinstance(values[0], ast.Constant) and values[0].value is True


def _of_media(node: ast.AST) -> Iterator[Unread]:
    """Yield the names of a part that tell of images, video or sound."""
    for name in media_in(node):
        yield Silent(option=name, value=f"line {getattr(node, 'lineno', 0)}", why=OF_MEDIA)


def _of_other_files(tree: ast.Module, beside: Callable[[str], str | None]) -> Iterator[Unread]:
    """Yield the other files of a program, imported by it or by one another, in which names decide about a step."""
    todo, seen = list(_imported(tree, "")), set[str]()
    while todo and len(seen) < MAX_FILES:
        module = todo.pop(0)
        text = None if module in seen else beside(module)
        seen |= {module} if text else set()
        if not text:
            continue
        try:
            other = parsed(text, module)
        except InputError:
            yield Unread(option=module[-60:], value="", why=_OTHER_FILE)
            continue
        words = dict.fromkeys(word for node in ast.walk(other) for word in _deciding(node))
        if words:
            yield Unread(option=module[-60:], value=", ".join([*words][:MAX_WORDS]), why=_OTHER_FILE)
        for node in ast.walk(other):
            yield from _of_media(node)
        todo += _imported(other, module)


def _deciding(node: ast.AST) -> Iterator[str]:
    """Yield the names in a part of another file that decide about a step."""
    yield from (option for option, _, _ in (*_called(node), *_assigned(node)))
    names: list[str] = []
    if isinstance(node, ast.Call):
        names = [dotted(node.func).rpartition(".")[2], *(item.arg or "" for item in node.keywords)]
    elif isinstance(node, ast.Assign):
        names = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
    yield from (name for name in names if name in _READ_IN_THE_PROGRAM)


def _imported(tree: ast.Module, importer: str) -> Iterator[str]:
    """Yield the dotted names that the modules a file imports may have; those of a package are its __init__."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = importer.split(".")[: -node.level] if node.level else []
            module = ".".join(filter(None, [*parts, node.module]))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        yield from (found for name in names if name for found in (name, f"{name}.__init__"))
