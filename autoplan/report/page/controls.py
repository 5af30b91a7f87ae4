"""Section of controls: changeable values of the plan, and pinned plans."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.report.page.content import Control, PlanContent
from autoplan.report.page.elements import folded, section
from autoplan.report.page.html import Markup, tag
from autoplan.report.page.plans import compared

USUAL = "as usual"  # label of an empty choice


def controls(content: PlanContent) -> Markup | None:
    """Return a form of all changeable values; a script requests the price of its contents."""
    if not content.controls:
        return None
    buttons = (
        tag("button", "Pin this plan", type="button", id="pin"),
        tag("button", "Back to the plan file", type="button", id="back"),
        tag("button", "Save as one file", type="button", id="save"),
    )
    return section(
        "controls",
        "Change it",
        "Every change is priced immediately; data parallelism uses the devices that the other degrees leave.",
        tag("form", _fields(content, options=False), folded("Options", _fields(content, options=True)), id="values"),
        tag("p", id="refused", role="alert", class_="refused"),
        tag("p", id="moved", role="status", class_="moved"),
        tag("div", *buttons, class_="buttons"),
    )


def _fields(content: PlanContent, *, options: bool) -> Markup:
    fields = (_field(control) for control in content.controls if control.is_option is options)
    return tag("div", *fields, class_="controls")


def _field(control: Control) -> Markup:
    """Return a label with its input, explained by a tip."""
    if control.choices:
        options = (
            tag("option", choice or USUAL, value=choice, selected=choice == control.value) for choice in control.choices
        )
        field = tag("select", *options, name=control.name)
    else:
        is_number = control.value.isdigit()
        field = tag(
            "input",
            name=control.name,
            value=control.value,
            placeholder=USUAL,
            autocomplete="off",
            inputmode="numeric" if is_number else None,
        )
    return tag("label", tag("span", control.label), field, data_tip=control.help)


def pinned(content: PlanContent) -> Markup | None:
    """Compare the shown plan with pinned ones; an empty element if there are none yet."""
    if not content.pinned:
        return tag("section", id="pinned", hidden=True) if content.controls else None
    names = ["shown", *(str(at) for at in range(1, len(content.pinned) + 1))]
    return section(
        "pinned",
        "Pinned plans",
        "Compared with the current plan; differences are highlighted.",
        compared((content.file, *content.pinned), names),
        tag("div", *_buttons(content), class_="buttons") if content.controls else None,
    )


def _buttons(content: PlanContent) -> Iterator[Markup]:
    for at in range(len(content.pinned)):
        yield tag("button", f"Show {at + 1}", type="button", data_show=str(at))
        yield tag("button", f"Unpin {at + 1}", type="button", data_unpin=str(at))
