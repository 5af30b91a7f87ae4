"""Scripts that start a program with Trainer arguments: the arguments, and the devices of the launcher."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import LaunchContext, Unread
from autoplan.frameworks.common.options import Argument, Options, Unknown, parse_json, parse_yaml, show
from autoplan.frameworks.common.shell import Script, script_of
from autoplan.frameworks.common.shell_words import is_open
from autoplan.frameworks.hf_trainer.options import SPMD
from autoplan.frameworks.hf_trainer.program import makes_arguments, options_of_program, trains
from autoplan.frameworks.megatron_lm.read import Entry, given_arguments, num_devices, started

NO_SCRIPTS = (".py", ".json", ".yaml", ".yml", ".toml", ".md", ".ipynb")  # suffixes; a shell script may have any other
BATCH = "--per_device_train_batch_size"
# Commands of TRL that train (trl/cli/commands), and the modules that they run.
_COMMANDS = ("sft", "dpo", "reward", "grpo", "kto", "rloo")
# Programs of TRL whose loss needs more than one pass, or which generate (trl/scripts).
OTHER_LOSSES = re.compile(
    r"(?<![a-z])(dpo|mpo|simpo|grpo|kto|ppo|rloo|rewards?|rm|orpo|cpo|gkd|nash|xpo|bco|online_\w+|distill\w*|sapo|gspo)(?![a-z])",
    re.IGNORECASE,
)
_LAUNCHERS = ("torch.", "accelerate.", "deepspeed.")
_MODULE = re.compile(r"trl\.scripts\.(\w+)")
# Words that argparse takes for the two options (parse_args, allow_abbrev): no other one of the Trainer begins so.
_ABBREVIATED = {
    **dict.fromkeys(("per_device_train", "per_device_train_batch"), "per_device_train_batch_size"),
    **dict.fromkeys(("gradient_accumulation", "gradient_acc"), "gradient_accumulation_steps"),
}
_SHORT_BATCH = "--per_device_train"
_BATCH = re.compile(rf"^[^#\n]*(?<![\w-]){_SHORT_BATCH}(_batch(_size)?)?\b", re.MULTILINE)
_FILES = (".yaml", ".yml", ".json")
_BEHIND_FOLDER = re.compile(r"(.*(?:[)}`\"']|\$\w+))/([\w./-]+\.py)", re.DOTALL)
# Programs of TRL, and of the examples of transformers, that set nothing beside their arguments.
_KNOWN = re.compile(
    rf"(.*/)?({'|'.join(_COMMANDS)}|run_[cmp]lm(_no_trainer)?)\.py|{'|'.join(_COMMANDS)}|trl\.scripts\.\w+"
)
_OF_TRL = re.compile(rf"({'|'.join(_COMMANDS)})\.py")
_IS_PYTHON = re.compile(r"\.py$|^[a-z_]\w*(\.\w+)+$")  # a file or a module, and no command
_OF_SWIFT = re.compile(r"\bswift[/.]cli[/.]")
_SWIFT = re.compile(r"(^|/)swift$")
_OVERRIDE_OF_HYDRA = re.compile(r"(\+{0,2}[\w./@]+)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"([a-z]\w*)=(.*)", re.DOTALL)


def has_batch(text: str) -> bool:
    """Return whether the Trainer's batch size occurs in a text outside of comments."""
    return _BATCH.search(text) is not None


def program_at(words: Sequence[str], programs: Sequence[str] = (), folder: Path | None = None) -> int | None:
    """Return the index of the program in a command with the Trainer's batch size, or of one in `folder` that trains.

    `programs` also take the name of a file with their arguments, alone or after the word train.
    """
    has_batch_size = any(_whole_name(word.partition("=")[0].removeprefix("--")) == BATCH[2:] for word in words)
    if not has_batch_size and not programs:
        places = (at for at in range(len(words)) if is_program(words, at))
        return next((at for at in places if (file := program_beside(words[at], folder)) and trains(file)), None)
    behind = max((at for at, word in enumerate(words) if word == "--"), default=-1) + 1  # a launcher's own arguments
    for at, word in enumerate(words[behind:], start=behind):
        name = word.rpartition("/")[2]
        if (
            (name in programs and (has_batch_size or takes_file(words[at + 1 :])))
            if programs
            else is_program(words, at)
        ):
            return at
    return None


def program_beside(name: str, folder: Path | None) -> str | None:
    """Return the text of a Python program, by its file or module, in the folder of a script or above it.

    Of a path whose folder only a running shell knows the rest is looked for; the folder of the script itself, such as
    $(dirname "$0")/.., is known.
    """
    file = name if name.endswith(".py") else f"{name.replace('.', '/')}.py"
    if is_open(file) and (parts := _BEHIND_FOLDER.fullmatch(file)) is not None:
        is_of_script = re.search(r"BASH_SOURCE|\$\{?0", parts[1]) is not None
        file = "../" * (parts[1].count("..") if is_of_script else 0) + parts[2]
    return content[0] if (content := read_beside(file, folder)) else None


def starts_program(text: str, context: LaunchContext) -> bool:
    """Return whether a command of a script starts a program in its folder that trains."""
    try:
        script = script_of(text, context)
    except (InputError, RecursionError):
        return False
    return any(program_at(command.words, folder=context.folder) is not None for command in script.commands)


def takes_file(arguments: Sequence[str]) -> bool:
    """Return whether the arguments of a program, which may be those of `train`, are in a file that comes first."""
    first = [word for word in arguments[:2] if word != "train"][:1]
    return any(word.endswith(_FILES) for word in first)


def is_program(words: Sequence[str], at: int) -> bool:
    """Return whether a word is a Python file, a module that is no launcher, or a command of TRL."""
    word, before = words[at], words[at - 1] if at else ""
    if before and word in _COMMANDS:
        return before.rpartition("/")[2] == "trl"
    is_module = before in ("-m", "--module") and not word.startswith(_LAUNCHERS)
    return word.endswith(".py") or word == "$TRAIN_SCRIPT" or is_module or _MODULE.fullmatch(word) is not None


def of_script(text: str, context: LaunchContext, programs: Sequence[str] = ()) -> tuple[Options, str, int | None]:
    """Return (arguments, program name, devices) of the last command that starts a program.

    Positional YAML or JSON files next to the script are read too; command-line arguments take precedence over them.
    Raises InputError if no command starts such a program.
    """
    script = script_of(text, context)
    names = (_SHORT_BATCH, ".py", *programs)
    entry = Entry(
        lambda words: program_at(words, programs, context.folder), lambda inner: any(name in inner for name in names)
    )
    before, words = started(script, entry, context)
    if words is None:
        raise InputError(f"no command of the script starts a program with {BATCH}")
    if (
        takes_file(words)
        and read_beside(file := next(word for word in words if word != "train"), context.folder) is None
    ):
        raise InputError(f"the arguments are in {show(file)}, which is not at hand: put it beside this file")
    devices = devices_of(before, script, text)
    with_devices = replace(context, num_devices=context.num_devices or devices)
    options, program = started_options(before[-1], words, with_devices)
    visible = str(script.variables.get("CUDA_VISIBLE_DEVICES", ""))
    if devices and visible.count(",") >= devices:
        why = f"{devices} processes start: layers that a program spreads over several devices each are not priced"
        options.remarks.append(Unread(option="CUDA_VISIBLE_DEVICES", value=visible, why=why))
    if script.variables.get("XLA_USE_SPMD") == "1":
        options.remarks.append(Unread(option="XLA_USE_SPMD", value="1", why=SPMD))
    options.remarks += script.unread()
    command = module[1] if (module := _MODULE.fullmatch(program)) else program
    return options, f"{command}.py" if command in _COMMANDS else program, devices


def started_options(program: str, words: Sequence[str], context: LaunchContext) -> tuple[Options, str]:
    """Return (arguments, name) of a program that a command starts, read too where it lies beside the script."""
    if _OF_SWIFT.search(program) is not None:
        raise InputError(f"{program} is of ms-swift, whose defaults are its own: start it with swift sft to read it")
    arguments = program_options(words, context)
    beside = program_beside(program, context.folder)
    if beside is None or not trains(beside) or (makes_arguments(beside) and has_batch(" ".join(words))):
        name = program.rpartition("/")[2]
        is_of_trl = _OF_TRL.fullmatch(name) is not None
        if is_of_trl and beside is not None and "trl" not in beside:  # its name alone is one of TRL's
            name = "train.py"
        if _IS_PYTHON.search(program) and (name == "train.py" or _KNOWN.fullmatch(program) is None):
            why = "what this program sets itself, such as recomputation, is not read"
            arguments.remarks.append(Unread(option=program.rpartition("/")[2][-60:], value="", why=why))
        return arguments, name
    options, name = options_of_program(beside, context, arguments)
    options.remarks += arguments.remarks
    is_named = name == "train.py" and OTHER_LOSSES.search(program) is not None
    return options, program.rpartition("/")[2] if is_named else name


def program_options(words: Sequence[str], context: LaunchContext) -> Options:
    """Return the arguments of a program: the words after its name, and those in the files that they reference."""
    arguments = given_arguments(words)
    typed_arguments = [_typed(argument) for argument in arguments if argument.option.startswith("--")]
    overrides = list(_overrides(arguments))
    options = Options([*of_files(arguments, context), *overrides, *typed_arguments])
    if not overrides:
        words_of_its_own = (pair for argument in arguments if (pair := _OVERRIDE_OF_HYDRA.fullmatch(argument.option)))
        options.remarks += (
            Unread(option=pair[1], value=pair[2], why="a word of the program's own, not read")
            for pair in words_of_its_own
        )
    options.remarks += (
        Unread(option=name, value="read by the program", why=f"{name} is not beside this file: put it there")
        for name in map(_file_of, arguments)
        if name and read_beside(name, context.folder) is None
    )
    return options


def _file_of(argument: Argument) -> str:
    """Return the file of arguments that a positional word or `--config` names; blank if it names none."""
    name = argument.option if argument.name != "config" else str(argument.value)
    return name if name.endswith(_FILES) else ""


def _overrides(arguments: Sequence[Argument]) -> Iterator[Argument]:
    """Yield the words KEY=VALUE after a file, which change its values (OmegaConf.from_cli, as in LLaMA-Factory)."""
    follows = False
    for argument in arguments:
        if follows and (pair := _OVERRIDE.fullmatch(argument.option)):
            key, text = pair.groups()
            value = Unknown(text) if is_open(text) else parse_yaml(f"{key}: {text}", argument.option)[key]
            yield Argument(key, text, key, value)
        follows |= argument.option.endswith(_FILES)


def _whole_name(name: str) -> str:
    """Return the name of an option that a command may abbreviate."""
    return _ABBREVIATED.get(name, name)


def _typed(argument: Argument) -> Argument:
    """Return the argument by its whole name, with JSON as a table, and the word for a switch as a boolean."""
    if (name := _whole_name(argument.name)) != argument.name:
        argument = replace(argument, name=name)
    if isinstance(argument.value, str) and argument.value.lstrip().startswith("{"):
        return replace(argument, value=parse_json(argument.value, argument.option))
    word = str(argument.value).casefold()
    if word in ("true", "false"):
        return replace(argument, value=word == "true")
    return argument


def of_files(arguments: Sequence[Argument], context: LaunchContext) -> list[Argument]:
    """Return the arguments in files that are named by positional words or by `--config`."""
    result: list[Argument] = []
    for name in map(_file_of, arguments):
        if name and (content := read_beside(name, context.folder)):
            parse = parse_json if name.endswith(".json") else parse_yaml
            result += Options.of_table(parse(*content)).arguments.values()
    return result


def devices_of(before: Sequence[str], script: Script, text: str) -> int | None:
    """Return the devices that a launcher's options, directives or variables set; None if nothing does."""
    count = num_devices(before, script, text)
    if any("torchrun" in word or "torch.distributed" in word for word in before) or (count or 0) > 1:
        return count
    variables = {name: value for name, value in script.variables.items() if isinstance(value, str)}
    per_node = variables.get("NPROC_PER_NODE", "")
    nodes = variables.get("NNODES", "1")
    if re.fullmatch(r"[1-9]\d{0,4}", per_node) and re.fullmatch(r"[1-9]\d{0,4}", nodes):
        return int(per_node) * int(nodes)
    if _SWIFT.search(before[-1]) and not {"NPROC_PER_NODE", "NNODES"} & set(script.variables):
        return 1  # swift/cli/main.py starts torchrun only for one of the two
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"\d{1,3}(,\d{1,3})*", visible) and "deepspeed" not in " ".join(before):
        is_alone = any(re.fullmatch(r"python[\d.]*", word.rpartition("/")[2]) for word in before)
        return count if is_alone else visible.count(",") + 1
    return count
