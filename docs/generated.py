"""Pages that the code writes: commands, files, presets, tables of measured runs.  A hook of mkdocs (`mkdocs.yml`)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from autoplan.base.units import format_bytes, format_rate, format_tokens
from autoplan.cli import COMMANDS, make_app
from autoplan.cli.schema import KINDS, schema
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.huggingface import model_types
from autoplan.readers.model import load_model, preset_models

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_RESULT = re.compile(r"<!-- result: (\w+), (below )?( *.+?) -->")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference, and every schema as a file for editors."""
    pages = {f"reference/{name}.md": "\n".join(lines()) for name, lines in PAGES.items()}
    schemas = {f"reference/schemas/{kind}.json": _schema(kind) for kind in KINDS}
    for path, content in (pages | schemas).items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Puts the newest result of a benchmark instead of `<!-- result: NAME, [below ]HOW ITS LINE BEGINS -->`."""
    return _RESULT.sub(lambda match: _result(match[1], match[3], below=match[2] is not None), markdown)


def _result(name: str, start: str, *, below: bool) -> str:
    """The lines of the newest result from the one that begins so to the next blank line, or those below that."""
    paths = sorted(RESULTS.glob(f"*_{name}.md"))
    if not paths:
        raise PluginError(f"benchmarks/results holds no {name}")
    _, found, text = f"\n{paths[-1].read_text()}".partition(f"\n{start}")
    part = f"{start}{text}".split("\n\n")[1 if below else 0]
    if not found:
        raise PluginError(f"{paths[-1].name} holds no line that begins {start!r}")
    return f"{_as_table(part.splitlines())}\n\n<small>`benchmarks/results/{paths[-1].name}`</small>"


def _as_table(lines: list[str]) -> str:
    """Rows of a name and numbers below one word for each column become a table; other columns stay as they are."""
    lines = [line for line in lines if not line.startswith("```")]
    if len(lines) == 1 or lines[0].startswith("|"):
        return "\n".join(lines)
    head, *rows = (line.rsplit(None, len(lines[0].split()) - 1) for line in lines)
    if not all(re.fullmatch(r"-|-?[\d.]+", cell) for row in rows for cell in row[1:]):
        return "\n".join(("```text", *lines, "```"))
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *["--:"] * (len(head) - 1)], *rows))


# -- commands ---------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    app = typer.main.get_command(make_app())
    yield "# Commands\n\nResults go to standard output, progress and warnings to standard error.  The exit status is 0;"
    yield "1 with one line that says what is wrong and the way out; or 2 for a wrong command line."
    for name in COMMANDS:
        yield from _command(f"autoplan {name}", app.commands[name])


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"\n## {name}\n"
    yield re.sub(r"(?m)^ +", "", command.help or "").replace("\f", "")
    if hasattr(command, "commands"):
        for inner in command.commands.values():
            yield from _command(f"{name} {inner.name}", inner)
        return
    context = typer.Context(command, info_name=name)
    yield f"\n```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    for title, kind in (("Argument", "argument"), ("Option", "option")):
        rows = [param.get_help_record(context) for param in command.params if param.param_type_name == kind]
        if any(rows):
            yield f"\n| {title} | |\n|---|---|"
            yield from (f"| `{_cell(row[0])}` | {_cell(row[1])} |" for row in rows if row)


def _presets() -> Iterator[str]:
    yield "# Presets\n\nWhat ships.  A name stands for a file below `autoplan/presets/`, which names its sources."
    yield "\n## Models\n\n| name | parameters | layers |\n|---|--:|--:|"
    for name in preset_models():
        model = load_model(name)
        yield f"| `{name}` | {format_tokens(count_parameters(model))} | {model.num_layers} |"
    yield "\nHugging Face `config.json` files of these types are read as well:"
    yield ", ".join(f"`{name}`" for name in model_types()) + "."
    yield "\n## Clusters\n\n| name | devices of a node | device | memory | network |\n|---|--:|---|--:|---|"
    for name in preset_clusters():
        cluster = load_cluster(name)
        network = f"{cluster.network.kind}, {format_rate(cluster.network.nic_bytes_per_s)} a NIC"
        memory = format_bytes(cluster.device.memory_bytes)
        yield f"| `{name}` | {cluster.devices_per_node} | {cluster.device.name} | {memory} | {network} |"
    yield "\n## Frameworks\n\n| name | sources |\n|---|---|"
    for name in preset_frameworks():
        yield f"| `{name}` | {_cell('; '.join(load_framework(name).sources))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- files ------------------------------------------------------------------------------------------------------------


def _files() -> Iterator[str]:
    yield "# Files\n\nEvery field, from the same schemas that `autoplan schema KIND` prints for editors and programs."
    yield '\nIn files that you write, a number may be text with its unit: `memory = "80GB"`, `nic = "400Gb/s"`,'
    yield '`peak = { bf16 = "989TFLOPS" }`.  Memory counts in powers of two, `80GB` like `80GiB`; rates are decimal,'
    yield "and a small b is a bit.  In counts, `8k` is 8,192."
    for kind in KINDS:
        described = json.loads(_schema(kind))
        yield f"\n## {kind}\n\n[JSON Schema](schemas/{kind}.json)"
        for name, part in described["$defs"].items():
            yield f"\n### {name} of {kind}\n\n{part.get('description', '')}\n"
            if part.get("properties"):
                yield "| field | type | if left out |\n|---|---|---|"
                yield from _fields(part)


def _schema(kind: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        schema(kind)
    return printed.getvalue()


def _fields(described: dict[str, Any]) -> Iterator[str]:
    for field, form in described["properties"].items():
        missing = "required" if field in described.get("required", ()) else f"`{json.dumps(form.get('default'))}`"
        yield f"| `{field}` | {_cell(_type(form))} | {missing} |"


def _type(form: dict[str, Any]) -> str:
    match form:
        case {"$ref": reference}:
            return reference.rpartition("/")[2]
        case {"anyOf": forms}:
            return " or ".join(_type(choice) for choice in forms)
        case {"enum": values}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}"
        case {"type": "object", "additionalProperties": values} if isinstance(values, dict):
            return f"table of {_type(values)}"
        case {"type": kind}:
            return str(kind)
    return "any"


PAGES = {"commands": _commands, "files": _files, "presets": _presets}
