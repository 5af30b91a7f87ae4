"""Reader of launch scripts of Megatron-LM's pretrain_gpt.py: bash scripts and plain lists of options."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.options import NOT_KNOWN, Argument, Options, Unknown, typed
from autoplan.frameworks.common.shell import Command, Script, script_of
from autoplan.frameworks.common.shell_words import is_one_word, is_open
from autoplan.frameworks.megatron_lm import with_slime
from autoplan.frameworks.megatron_lm.launch import launch_of
from autoplan.frameworks.megatron_lm.model_options import FUSED_PERMUTE, GROUPED
from autoplan.frameworks.megatron_lm.options import SWITCHES
from autoplan.frameworks.megatron_lm.table import argument_of
from autoplan.frameworks.megatron_lm.with_deepspeed import FRAMEWORK, is_with_deepspeed, translate
from autoplan.frameworks.megatron_lm.with_flagscale import is_of_flagscale, settings_of
from autoplan.frameworks.megatron_lm.with_slime import is_with_slime

ENTRIES = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py", "flagscale/train/train_gpt.py")
# Options that identify a launch of another program with Megatron-LM's options, and programs that train no decoder.
_DEGREES = re.compile(r"(?<![\w-])--(tensor-model-parallel-size|pipeline-model-parallel-size)\b")
_LENGTHS = re.compile(r"(?<![\w-])--(train-iters|train-samples|global-batch-size|rollout-batch-size)\b")
_KERNELS = ("attention_backend", "use_flash_attn", "transformer_impl")  # options that name the kernel of attention
# Options of releases whose layers are Transformer Engine's by default, which is so from Megatron-Core 0.6 on.
_SINCE_FLASH = (
    *("ckpt_format", "use_legacy_models", "recompute_modules", "multi_latent_attention", "use_megatron_fsdp"),
    *("cross_entropy_loss_fusion", "moe_router_dtype", "moe_permute_fusion", "fp8_recipe", "mtp_num_layers"),
    *("num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("expert_tensor_parallel_size", "use_precision_aware_optimizer", "optimizer_cpu_offload", "cp_comm_type"),
    *("fp8_param_gather", "num_distributed_optimizer_instances", "create_attention_mask_in_dataloader"),
)
_IMPORTED = re.compile(r"^(?:from|import)[ \t]+(\w+)", re.MULTILINE)
# What Megatron-LM's own pretrain programs import, of all versions, and those of Megatron-DeepSpeed.
_OF_MEGATRON = (
    *("megatron", "torch", "numpy", "packaging", "deepspeed", "transformer_engine", "modelopt"),
    *("nvidia_resiliency_ext", "gpt_builders", "mamba_builders", "hybrid_builders", "model_provider", "pretrain_gpt"),
)
MAX_NAMED = 6  # variables in a message
_OTHER_NAMES = (".py", ".json", ".yaml", ".yml", ".toml", ".md")
_OTHER_PROGRAMS = re.compile(
    r"bert|t5|retro|ict|vision|vlm|vit|llava|multimodal|mimo|diffusion|whisper|encoder|generat|infer|server|convert"
    r"|preprocess|checkpoint|partition|eval|export|quantiz|prune|distill|dataset|(?<![a-z])(dpo|kto|orpo|reward)(?![a-z])"
)
_FOLDERS = re.compile(r"bert|t5|retro|vision|vlm|multimodal\w*|mimo|diffusion|whisper")  # of examples/


def recognises(name: str, text: str) -> bool:
    """Return whether a file looks like a launch of Megatron-LM, or of a program that takes its options."""
    if is_of_flagscale(name, text):
        return True
    if any(entry in text for entry in ENTRIES):
        return True
    if text.lstrip().startswith("--"):
        return re.search(r"--(num-layers|tensor-model-parallel-size)\b", text) is not None
    is_script = not name.endswith(_OTHER_NAMES) and "run_recipe.py" not in text
    return is_script and _DEGREES.search(text) is not None and _LENGTHS.search(text) is not None


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of a script, a list of options or an experiment of FlagScale."""
    of_flagscale = is_of_flagscale(".yaml", text) and not text.lstrip().startswith(("--", "#!"))
    script = Script() if of_flagscale else script_of(text, context)
    program, devices = None, None
    before: tuple[str, ...] = ()
    words: tuple[str, ...] | None
    if of_flagscale:
        words, devices, script.environment = settings_of(text, context)
    elif not text.lstrip().startswith("--"):
        before, words = started(script, named(ENTRIES), context)
        if words is None:
            before, words = started(script, _OTHER, context)
            program = _other_program(before)
        if words is None:
            program, words = "a script that sources this one", _in_variables(script)
        if words is None:
            raise InputError("no command of the script starts pretrain_gpt.py, or a program with options of its kind")
    else:
        words = tuple(word for command in script.commands for word in command.words)
    arguments = Options(given_arguments(words), way_out="pass --model")
    arguments.remarks += script.unread()
    if program is None and (foreign := _foreign(before, context)):
        why = f"imports {', '.join(foreign[:3])}: not Megatron-LM's own program, and what it changes is not read"
        arguments.remarks.append(Unread(option=before[-1].rpartition("/")[2], value="", why=why))
    if program is not None:
        arguments.is_partial = True
        arguments.remarks.append(Unread(option=program, value="", why="another program: read as pretrain_gpt.py"))
    target, framework = "megatron-lm", "megatron-core"
    if is_with_deepspeed(arguments):
        translate(arguments, has_model=context.model is not None)
        target = framework = FRAMEWORK
    devices = devices or num_devices(before, script, text)
    if is_with_slime(arguments):
        devices = with_slime.translate(arguments) or devices
    for row in (GROUPED, FUSED_PERMUTE):
        if arguments.value("num_experts") and not arguments.has(row.key):
            arguments.remark(row.key, row.why, default="off")
    try:
        launch = launch_of(
            arguments, context, target=target, framework=framework, num_devices=devices, makes_masks=program is None
        )
    except InputError as error:
        raise InputError(f"{error}{_left_open(script)}") from None
    is_other_version = any(item.why == NOT_KNOWN and item.option[:2] == "--" for item in launch.unread)
    is_recent = any(map(arguments.has, _SINCE_FLASH)) and not is_other_version
    if is_recent or any(map(arguments.has, _KERNELS)):
        return launch
    why = "flash is priced; versions before Megatron-Core 0.6, whose layers are local by default, keep the scores"
    return replace(launch, unread=(Unread(option="--attention-backend", value="not given", why=why), *launch.unread))


def _foreign(before: Sequence[str], context: LaunchContext) -> list[str]:
    """Return the packages that the program of a command imports, if it lies beside, and Megatron-LM's does not."""
    content = read_beside(before[-1], context.folder) if before else None
    names = dict.fromkeys(_IMPORTED.findall(content[0])) if content else {}
    return [name for name in names if name not in sys.stdlib_module_names and name not in _OF_MEGATRON]


def _in_variables(script: Script) -> tuple[str, ...] | None:
    """Return the options in arrays of a script that another one sources; None if these hold no degrees."""
    words = tuple(word for value in script.variables.values() if isinstance(value, list) for word in value)
    return words if any(map(_DEGREES.fullmatch, words)) else None


def _left_open(script: Script) -> str:
    """Describe what could not be decided: conditions, by the variables that they depend on, and missing scripts."""
    if script.missing:
        return f"; the script sources {', '.join(script.missing[:2])[:150]}, not found beside it: put it there"
    names = dict.fromkeys(name for condition in script.open for name in re.findall(r"\$\{?(\w+)", condition))
    names = {name: None for name in names if is_open(str(script.variables.get(name, "$")))}
    ways = ", ".join(f"--set {name}=VALUE" for name in list(names)[:MAX_NAMED])
    return f"; conditions of the script depend on variables that it does not set: pass {ways}" if ways else ""


@dataclass(frozen=True, slots=True)
class Entry:
    """Recognition of a program: its position among words, and whether a text may contain its command."""

    position: Callable[[Sequence[str]], int | None]
    may_be_in: Callable[[str], bool]


def named(entries: Sequence[str]) -> Entry:
    """Return the recognition of programs by name."""

    def position(words: Sequence[str]) -> int | None:
        places = (at for at, word in enumerate(words) if word.endswith(tuple(entries)) and is_one_word(word))
        return next(places, None)

    return Entry(position, lambda text: any(entry in text for entry in entries))


def _program_before_degrees(words: Sequence[str]) -> int | None:
    """Return the index of the program that is followed by parallelism options of Megatron-LM."""
    if not any(_DEGREES.fullmatch(word.partition("=")[0]) for word in words):
        return None
    programs = (at for at, word in enumerate(words) if word.endswith(".py") and is_one_word(word))
    return next(programs, None)


_OTHER = Entry(_program_before_degrees, lambda text: _DEGREES.search(text) is not None)


def _other_program(before: Sequence[str]) -> str | None:
    """Return the name of the program at the end of some words; raises InputError if it does not train a decoder."""
    if not before:
        return None
    folder, _, name = before[-1].rpartition("/")
    kind = _OTHER_PROGRAMS.search(name.casefold()) or _FOLDERS.fullmatch(folder.rpartition("/")[2])
    if kind is not None or folder.endswith("tasks"):  # tasks/main.py evaluates and fine-tunes several kinds
        raise InputError(f"{before[-1][-60:]} ({kind[0] if kind else 'a task'}) trains no plain language model")
    return name


def started(
    script: Script, entry: Entry, context: LaunchContext, depth: int = 0
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the words before and after the last start of the program (None if absent), also from nested scripts."""
    start: tuple[tuple[str, ...], tuple[str, ...] | None] = ((), None)
    starts = set[tuple[str, ...] | None]()
    for command in script.commands:
        if command.words[:1] in (("echo",), ("printf",)):
            continue
        if (at := entry.position(command.words)) is not None:
            start = (command.words[: at + 1], command.words[at + 1 :])
        elif depth < 5 and (inner := _inner(command, entry)) is not None:
            nested = script_of(inner, replace(context, variables=(*context.variables, *_texts(script))))
            before, words = started(nested, entry, context, depth + 1)
            if words is not None:
                start = ((*command.words, *before), words)
        starts.add(start[1])
    script.num_starts = len(starts - {None})
    return start


def _inner(command: Command, entry: Entry) -> str | None:
    """Return the script in a command: a word after -c, or any text that may start the program."""
    for before, text in pairwise(("", *command.words, command.text)):
        if re.search(r"\s", text) and (entry.may_be_in(text) or re.fullmatch(r"-[a-z]*c", before)):
            return text
    return None


def _texts(script: Script) -> list[tuple[str, str]]:
    return [(name, value) for name, value in script.variables.items() if isinstance(value, str)]


def given_arguments(words: Sequence[str]) -> list[Argument]:
    """Return the options in a list of words, by the names of Megatron-LM's parsed arguments."""
    result: list[Argument] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--"):
            result.append(Argument(word, "", word, word))
            continue
        option, sign, value = word.partition("=")
        values = [value] if sign else []
        while not sign and at < len(words) and not words[at].startswith("--"):
            values.append(words[at])
            at += 1
        # An unset variable may contain options; after a value or a switch it is not a value.
        keeps = 0 if argument_of(option, ())[0] in SWITCHES else 1
        strays = [item for item in values[keeps:] if is_open(item) and re.fullmatch(r"\$\{?\w+(\[[@*]\])?\}?", item)]
        values = [item for place, item in enumerate(values) if place < keeps or item not in strays]
        name, value = argument_of(option, values)
        parsed = Unknown(value) if isinstance(value, str) and is_open(value) else typed(value)
        result.append(Argument(option, " ".join(values), name, parsed))
        result += [Argument(stray, "", stray, stray) for stray in strays]
    return result


def num_devices(before: Sequence[str], script: Script, text: str) -> int | None:
    """Return the devices set by a launcher's options, Slurm directives or variables; None if nothing sets them."""
    options = _options(before)
    if any("torchrun" in word or "torch.distributed" in word for word in before):
        per_node, nodes = options.get("nproc_per_node", "1"), options.get("nnodes", "1").partition(":")[0]
        return _product(per_node, nodes)
    if any(word.endswith("deepspeed") for word in before) and "num_gpus" in options:
        return _product(options["num_gpus"], options.get("num_nodes", "1"))
    if any(word.endswith("deepspeed") for word in before) and (hosts := options.get("include") or options.get("i")):
        return _included(hosts)
    directives = _options([word for line in re.findall(r"(?m)^\s*#SBATCH\s+(.*)$", text) for word in line.split()])
    for name in ("ntasks", "n", "np"):
        if name in options:
            return _product(options[name])
    all_options = directives | options
    per_node = all_options.get("ntasks_per_node") or all_options.get("gpus_per_node", "").rpartition(":")[2]
    nodes = all_options.get("nodes") or all_options.get("N") or ""
    if per_node and nodes:
        return _product(per_node, nodes)
    if all_options.get("ntasks"):
        return _product(all_options["ntasks"])
    world = script.variables.get("WORLD_SIZE")
    return int(world) if isinstance(world, str) and world.isdigit() else None


def _options(words: Sequence[str]) -> dict[str, str]:
    result = {}
    for at, word in enumerate(words):
        if word.startswith("-"):
            name, sign, value = word.lstrip("-").partition("=")
            follows = words[at + 1] if at + 1 < len(words) else ""
            result[name.replace("-", "_")] = value if sign else follows
    return result


def _included(hosts: str) -> int | None:
    """Return the devices of DeepSpeed's --include, such as worker-0:0,1@worker-1:0,1; None if a host lists none."""
    slots = [host.partition(":")[2] for host in hosts.split("@")]
    if not all(re.fullmatch(r"\d{1,4}(,\d{1,4})*", names, re.ASCII) for names in slots):
        return None
    return sum(len(names.split(",")) for names in slots)


def _product(*numbers: str) -> int | None:
    if not all(re.fullmatch(r"\d{1,7}", number, re.ASCII) for number in numbers):
        return None
    result = 1
    for number in numbers:
        result *= int(number)
    return result or None


READER = Reader(target="megatron-lm", recognises=recognises, read=read)
