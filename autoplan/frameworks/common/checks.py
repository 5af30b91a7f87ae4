"""Checks of a launch in every format: the batch, what its model leaves out, conditions that a running shell decides."""

from __future__ import annotations

from dataclasses import fields, replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.media import OF_MEDIA, tells_of_media
from autoplan.frameworks.common.options import NOT_KNOWN, show
from autoplan.frameworks.common.shell import FIRST_ROUND, UNDECIDED
from autoplan.readers.model import left_out

MAX_TRIED = 16  # conditions that are tried both ways
_NO_MATTER = f"{UNDECIDED}, and what is read is the same either way"
_NO_ENCODER = "of a model of images or sound, whose encoder is not in the model that is priced"
MAX_SHOWN = 3  # differences in a message


def checked(reader: Reader, text: str, context: LaunchContext) -> Launch:
    """Read a launch; conditions that are not decided matter where the launch is another if they hold, or do not."""
    launch = _with_encoder(_with_batch(reader.read(text, context)), context)
    undecided = [
        item for item in launch.unread if item.why == UNDECIDED and not item.matters and FIRST_ROUND not in item.option
    ]
    if not undecided:
        return launch
    tried = {item: _tried(reader, text, context, launch, item) for item in undecided[:MAX_TRIED]}
    unread = (tried.get(item, item) for item in launch.unread)
    return replace(launch, unread=tuple(sorted(unread, key=lambda item: not item.matters)))


def _tried(reader: Reader, text: str, context: LaunchContext, launch: Launch, item: Unread) -> Unread:
    """Return a condition with what it changes in the launch if it holds, or does not."""
    for holds in (True, False):
        if change := _change(reader, text, replace(context, assumed=(item.option, holds)), launch):
            why = f"{UNDECIDED}; if it {'holds' if holds else 'does not hold'}: {change}"
            return replace(item, why=why, matters=True)
    return replace(item, why=_NO_MATTER)


def _with_batch(launch: Launch) -> Launch:
    """Return the launch, with a remark if its step is no whole number of micro-batches on every replica."""
    plan = launch.plan
    if plan.num_microbatches * plan.micro_batch * plan.dp == plan.global_batch:
        return launch
    why = f"no whole number of micro-batches of {plan.micro_batch:,} on {plan.dp:,} replicas: pass the right --devices"
    uneven = Unread(option="global batch", value=f"{plan.global_batch:,}", why=why)
    return replace(launch, unread=(uneven, *launch.unread))


def _with_encoder(launch: Launch, context: LaunchContext) -> Launch:
    """Return the launch, with a remark on an encoder of images or sound that the model that is priced has not.

    Either its preset leaves the encoder out, or the file, or the program that it starts, speaks of one.
    """
    if launch.model.stands_before_text:
        return launch
    if context.model is None and (part := left_out(launch.model)):
        why = f"{part} of this checkpoint is not priced: pass --model with its config.json"
        return replace(launch, unread=(Unread(option="model", value=launch.model.checkpoint, why=why), *launch.unread))
    items = (*launch.unread, *launch.silent)
    settings = [*((item.option, item.value) for item in items), *launch.options]
    found = [(item.option, item.value) for item in items if item.why == OF_MEDIA]
    found += [setting for setting in settings if tells_of_media(*setting)]
    if not found:
        return launch
    option, value = found[0]
    old = next((item for item in launch.unread if item.option == option), None)
    reasons = [old.why] if old and old.matters and old.why != NOT_KNOWN else []
    item = Unread(option=option, value=value, why="; ".join([*reasons, _NO_ENCODER]))
    return replace(launch, unread=(item, *(other for other in launch.unread if other is not old)))


def _change(reader: Reader, text: str, context: LaunchContext, launch: Launch) -> str:
    """Describe what another outcome of a condition changes in the launch; blank if nothing."""
    try:
        other = reader.read(text, context)
    except InputError as error:
        return str(error)[:120]
    if other.model != launch.model:
        return "another model"
    for before, after in ((launch.plan, other.plan), (launch.training, other.training)):
        names = [field.name for field in fields(before) if getattr(before, field.name) != getattr(after, field.name)]
        if names:
            return ", ".join(f"{name} {show(getattr(after, name))}" for name in names[:MAX_SHOWN])
    known = {(item.option, item.value) for item in launch.unread}
    more = [item.option for item in other.unread if item.matters and (item.option, item.value) not in known]
    return f"{', '.join(more[:MAX_SHOWN])}, not read" if more else ""
