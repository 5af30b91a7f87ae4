"""Checks of a launch that hold for every format: conditions that only a running shell decides, and the batch."""

from __future__ import annotations

from dataclasses import fields, replace

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader, Unread
from autoplan.frameworks.common.options import show
from autoplan.frameworks.common.shell import FIRST_ROUND, UNDECIDED

MAX_TRIED = 16  # conditions that are tried both ways
MAX_SHOWN = 3  # differences in a message


def with_conditions(reader: Reader, text: str, context: LaunchContext) -> Launch:
    """Read a launch; conditions that are not decided matter where the launch is another if they hold, or do not."""
    launch = _counted(reader.read(text, context))
    undecided = [
        item for item in launch.unread if item.why == UNDECIDED and not item.matters and FIRST_ROUND not in item.option
    ]
    found: dict[Unread, Unread] = {}
    for item in undecided[:MAX_TRIED]:
        for holds in (True, False):
            if change := _change(reader, text, replace(context, assumed=(item.option, holds)), launch):
                why = f"{UNDECIDED}; if it {'holds' if holds else 'does not hold'}: {change}"
                found[item] = replace(item, why=why, matters=True)
                break
    if not found:
        return launch
    unread = (found.get(item, item) for item in launch.unread)
    return replace(launch, unread=tuple(sorted(unread, key=lambda item: not item.matters)))


def _counted(launch: Launch) -> Launch:
    """Return the launch, with a remark if its step is no whole number of micro-batches on every replica."""
    plan = launch.plan
    if plan.num_microbatches * plan.micro_batch * plan.dp == plan.global_batch:
        return launch
    why = f"no whole number of micro-batches of {plan.micro_batch:,} on {plan.dp:,} replicas: pass the right --devices"
    uneven = Unread(option="global batch", value=f"{plan.global_batch:,}", why=why)
    return replace(launch, unread=(uneven, *launch.unread))


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
