"""Reader of experiment files of Primus: YAML whose keys are the arguments of Megatron-LM, over presets."""

from __future__ import annotations

import re
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.literals import MAX_BITS
from autoplan.frameworks.common.options import Argument, Options, parse_yaml, typed
from autoplan.frameworks.megatron_lm.launch import launch_of
from autoplan.frameworks.primus.options import LANGUAGE_MODEL, TRAINER
from autoplan.frameworks.primus.presets import configs_folder, preset
from autoplan.frameworks.primus.rules import ALGORITHMS
from autoplan.readers.model import find_preset
from autoplan.spec.enums import Schedule
from autoplan.spec.model import ModelSpec

MAX_CHARACTERS = 2**20
MAX_DEPTH = 20

_VARIABLE = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")
_PLAIN = re.compile(r"\.ya?ml$")
_ALGORITHMS: dict[str, Schedule | None] = {
    "1f1b": None,
    "1f1b-interleaved": None,
    "zero-bubble-heuristic": Schedule.ZB_H1,
    "v-half": Schedule.ZB_V,
    "v-min": Schedule.ZB_V,
    "zero-bubble": Schedule.ZB_H1,
    "zbv-formatted": Schedule.ZB_V,
}
# Keys of Primus that have no effect when off.
_IDLE = re.compile(r"(use_turbo|enable_primus_turbo|turbo_|patch_|zero_bubble|offload|dump_|pp_warmup|use_rocm)")


def recognises(name: str, text: str) -> bool:
    """Return whether a file looks like an experiment of Primus."""
    return name.endswith((".yaml", ".yml")) and "pre_trainer:" in text and "modules:" in text


def read(text: str, context: LaunchContext) -> Launch:
    """Return the launch of an experiment, which never contains the number of devices."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"an experiment of Primus is at most {MAX_CHARACTERS:,} characters long")
    table = parse_yaml(text, "the file")
    trainer = _inside(_inside(table, "modules"), "pre_trainer")
    variables = dict(context.variables)
    framework = _expanded(trainer.get("framework"), variables)
    if framework != "megatron":
        raise InputError(f"framework {str(framework)[:40]!r} of Primus is not read here, only megatron")
    overrides = trainer.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise InputError("modules.pre_trainer.overrides must be a table")
    values = {str(key): _expanded(value, variables) for key, value in overrides.items()}
    name = str(_expanded(trainer.get("model"), variables))
    if name.startswith("diffusion/"):
        raise InputError(f"the preset {name[:60]!r} makes images: only training on the next token is priced")
    read_presets = _presets(name, str(_expanded(trainer.get("config"), variables)), context, variables)
    base = None if read_presets else _model(name, context)
    model = read_presets | values
    kind = "hybrid" if model.get("is_hybrid_model") is True else str(model.get("model_type") or "gpt")
    if kind != "gpt" and context.model is None:
        raise InputError(f"model_type {kind[:40]!r} of {name[:60]!r} has layers of its own, not read: pass --model")
    defaults = TRAINER | ({"hidden_dropout": 0.0, "attention_dropout": 0.0} if base else LANGUAGE_MODEL)
    arguments = Options(
        (Argument(key, _text(value), key, None if value == "null" else value) for key, value in values.items()),
        read_presets or defaults,
        way_out="pass --model",
    )
    if base and context.model is None:
        why = f"taken for {base.name}; Primus' preset of that name may differ: pass --set PRIMUS_DIR=its checkout"
        arguments.remarks.append(Unread(option="model", value=name, why=why))
    schedule = _schedule(arguments)
    if base and base.moe and "expert_model_parallel_size" not in values:
        arguments.remark("expert_model_parallel_size", "the preset of the model may set it", default="1")
    if "recompute_layer_ids" in arguments.arguments:
        arguments.remark("recompute_layer_ids", "priced as all layers")
    for key, value in values.items():
        if key not in arguments.understood and _IDLE.match(key):
            if value in (None, False, 0, "null", ""):
                arguments.understood.add(key)
            elif key in arguments.arguments:
                arguments.remark(key, "what Primus does beside Megatron-LM is not priced")
    return launch_of(
        arguments,
        context,
        target="primus",
        framework="primus",
        num_devices=None,
        base=base,
        schedule=schedule,
        makes_masks=True,
    )


def _presets(model: str, config: str, context: LaunchContext, variables: dict[str, str]) -> dict[str, Any]:
    """Return the arguments in the files of presets; empty if the files cannot be found."""
    folder = configs_folder(context)
    if folder is None or (of_model := preset(folder, "models", _file(model))) is None:
        return {}
    merged = (preset(folder, "modules", _file(config)) or TRAINER) | of_model
    expanded = {key: _expanded(value, variables) for key, value in merged.items()}
    shipped = find_preset(_PLAIN.sub("", model))
    if not find_preset(str(expanded.get("tokenizer_model"))) and expanded.get("vocab_size") is None and shipped:
        expanded["vocab_size"] = shipped.vocab_size
    return {key: value for key, value in expanded.items() if value not in (None, "null")}


def _file(name: str) -> str:
    return name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"


def _inside(table: Any, key: str) -> dict[str, Any]:
    inner = table.get(key) if isinstance(table, dict) else None
    if not isinstance(inner, dict):
        raise InputError(f"not an experiment of Primus: it has no table {key!r}")
    return inner


def _expanded(value: Any, variables: dict[str, str], depth: int = 0) -> Any:
    """Return a value with `${NAME:default}` replaced; as in Primus, results like numbers or switches are converted."""
    if depth > MAX_DEPTH:
        raise InputError(f"a value is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_expanded(item, variables, depth + 1) for item in value]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in variables:
            return variables[name]
        if default is None:
            raise InputError(f"the file needs the variable {name[:60]}: pass --set {name[:60]}=VALUE")
        return str(default)

    text = _VARIABLE.sub(replaced, value)
    if text == value:
        return value
    return {"true": True, "false": False}.get(text.casefold(), typed(text))


def _text(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise InputError(f"a number of {value.bit_length()} bits is no option's")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _model(name: str, context: LaunchContext) -> ModelSpec | None:
    """Return the model that a Primus preset starts from; None for the preset that only contains defaults."""
    plain = _PLAIN.sub("", name)
    if context.model is not None or plain == "language_model":
        return context.model
    if preset := find_preset(plain):
        return preset
    raise InputError(f"the preset {name[:60]!r} of Primus is not a known model: pass --model")


def _schedule(arguments: Options) -> Schedule | None:
    """Return the schedule that Primus adds to Megatron-LM, if one is set."""
    if arguments.flag("patch_primus_pipeline"):
        name = arguments.text("pp_algorithm", "1f1b-interleaved") or ""
        if name not in _ALGORITHMS:
            raise InputError(f"pp_algorithm {name[:40]!r} is not one of {', '.join(_ALGORITHMS)}")
        schedule = _ALGORITHMS[name]
        if schedule and name not in ALGORITHMS.values():
            arguments.remark("pp_algorithm", f"priced as {ALGORITHMS[schedule]}")
        return schedule
    arguments.understood.add("pp_algorithm")
    if not arguments.flag("patch_zero_bubble") or not arguments.flag("enable_zero_bubble", True):
        return None
    if arguments.flag("enable_1f1b_v"):
        arguments.remark("enable_1f1b_v", "priced as zb-v")
        return Schedule.ZB_V
    if arguments.flag("zero_bubble_v_schedule"):
        if arguments.text("zero_bubble_v_schedule_mem_setup", "half") != "zb":
            arguments.remark("zero_bubble_v_schedule_mem_setup", "priced as zb", default="half")
        return Schedule.ZB_V
    if "zero_bubble_max_pending_backward" in arguments.arguments:
        arguments.remark("zero_bubble_max_pending_backward", "priced as ZB-H1, with as many in flight as 1F1B")
    return Schedule.ZB_H1


READER = Reader(target="primus", recognises=recognises, read=read)
