"""Statements of a Python program that change a step beside its arguments; they are listed, not read."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from autoplan.frameworks.common.launch import Unread
from autoplan.frameworks.common.literals import dotted

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
# Words of another file of the program that decide about a step.
_DECIDES = re.compile(
    r"gradient_checkpointing\w*|LoraConfig|get_peft_model|BitsAndBytesConfig|load_in_[48]bit|attn_implementation"
    r"|requires_grad_?|torch\.compile|replace_\w*attn\w*|apply_liger_\w+|fully_shard|FullyShardedDataParallel"
)
MAX_WORDS = 4  # of another file
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
        if isinstance(node, ast.ClassDef):
            yield from _overridden(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported(node, beside)
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


def _imported(node: ast.Import | ast.ImportFrom, beside: Callable[[str], str | None]) -> Iterator[Unread]:
    """Yield the files of a program itself from which it imports, where words in them decide about a step."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    for module in filter(None, modules):
        if (text := beside(module)) and (words := dict.fromkeys(match[0] for match in _DECIDES.finditer(text))):
            why = "another file of the program, which is not read"
            yield Unread(option=module[-60:], value=", ".join([*words][:MAX_WORDS]), why=why)
