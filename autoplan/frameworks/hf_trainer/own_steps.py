"""Statements of a Python program that change a step beside its arguments: they are listed, not read."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from autoplan.frameworks.common.launch import Unread
from autoplan.frameworks.common.literals import dotted

# (last part of what is called, or of an attribute that is set; why it matters)
_CALLS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(names), why)
    for names, why in (
        (r"requires_grad_|freeze\w*", "weights that it freezes are priced as trained"),
        (r"half|bfloat16", "weights are priced in the type in which they are loaded"),
        (r"compile", "priced as not compiled"),
        (
            r"FullyShardedDataParallel|FSDP|fully_shard|DistributedDataParallel|DDP|parallelize_module|DataParallel",
            "not read",
        ),
        (r"apply_liger_\w+|replace_\w*(attn|attention)\w*|\w*monkey_?patch\w*|patch_\w*model\w*", "priced without it"),
        (r"PeftModel\w*\.from_pretrained", "adapters that are loaded are not read: pass --finetune"),
        (r"(DeepSpeedCPU|FusedAdam|Adafactor|Lion|Muon|SGD|Adam\w*)", "priced with the optimizer of the arguments"),
    )
)
_SET = {
    "requires_grad": _CALLS[0][1],
    "_attn_implementation": "the kernel of attention is that of the arguments",
    "attn_implementation": "the kernel of attention is that of the arguments",
}
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
MAX_WORDS = 4
_ADAPTERS = re.compile(r"\bget_peft_model\(|\bLoraConfig\(|\bpeft_config\b")


def own_steps(tree: ast.Module, source: str, beside: Callable[[str], str | None]) -> Iterator[Unread]:
    """Yield what a program does that no argument says; `beside` finds the text of a module by its dotted name."""
    has_adapters = _ADAPTERS.search(source) is not None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            last = name.rpartition(".")[2]
            why = next((why for names, why in _CALLS if names.fullmatch(last) or names.fullmatch(name)), None)
            is_harmless = why == _SET["requires_grad"] and (has_adapters or _is_true(node.args[:1]))
            if why is not None and not is_harmless and not _is_of_text(name):
                yield Unread(option=f"{last[-60:]}()", value=f"line {node.lineno}", why=why)
            if any(item.arg == "optimizers" for item in node.keywords):
                yield Unread(option="optimizers", value=f"line {node.lineno}", why=_METHODS["create_optimizer"])
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Attribute) or target.attr not in _SET:
                    continue
                if target.attr != "requires_grad" or not (has_adapters or _is_true([node.value])):
                    yield Unread(option=target.attr, value=f"line {node.lineno}", why=_SET[target.attr])
        elif isinstance(node, ast.ClassDef) and any("Trainer" in dotted(base) for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in _METHODS:
                    yield Unread(option=f"{node.name[:40]}.{method.name}", value="", why=_METHODS[method.name])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported(node, beside)


def _is_true(values: list[ast.expr]) -> bool:
    return bool(values) and isinstance(values[0], ast.Constant) and values[0].value is True


def _is_of_text(name: str) -> bool:
    """Return whether a call is one of `re` or of a template, which have methods of the same names."""
    return name.partition(".")[0] in ("re", "regex", "pattern", "jinja2")


def _imported(node: ast.Import | ast.ImportFrom, beside: Callable[[str], str | None]) -> Iterator[Unread]:
    """Yield the files of a program itself from which it imports, where words in them decide about a step."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    for module in filter(None, modules):
        if (text := beside(module)) and (words := dict.fromkeys(match[0] for match in _DECIDES.finditer(text))):
            why = "another file of the program, which is not read"
            yield Unread(option=module[-60:], value=", ".join([*words][:MAX_WORDS]), why=why)
