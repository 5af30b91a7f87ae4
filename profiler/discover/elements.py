"""XML of external tools as a small tree, parsed as untrusted: no entities, bounded depth, size and attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from autoplan.base.errors import InputError
from autoplan.base.units import cleaned
from autoplan.profiler.discover.text import shown, whole_number

MAX_ELEMENTS = 50_000  # hwloc writes about ten per core
MAX_DEPTH = 100  # NCCL's and hwloc's trees have about 20 levels
MAX_TEXT = 100_000  # characters directly inside an element; hwloc splits its matrices into pieces of a few hundred


@dataclass(slots=True, kw_only=True)
class Element:
    """Element with its attributes and children, and the text directly inside it."""

    name: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def get(self, key: str) -> str:
        """Return an attribute without control characters; blank if it is missing."""
        return cleaned(self.attributes.get(key, ""))

    def number(self, key: str, *, at_most: int, default: int = 0) -> int:
        """Return an integer attribute; `default` if it is missing or blank."""
        text = self.attributes.get(key, "").strip()
        return whole_number(text, f"line {self.line}: {key} of {self.name}", at_most=at_most) if text else default

    def named(self, *names: str) -> Iterator[Element]:
        """Yield the children with these names."""
        return (child for child in self.children if child.name in names)

    def walk(self) -> Iterator[Element]:
        """Yield the element and all its descendants, in the order of the file."""
        waiting = [self]
        while waiting:
            element = waiting.pop()
            yield element
            waiting.extend(reversed(element.children))


class _Reader:
    """Builds the tree from the events of expat."""

    def __init__(self) -> None:
        self.expat = expat.ParserCreate()
        self.expat.StartElementHandler = self._start
        self.expat.EndElementHandler = self._end
        self.expat.CharacterDataHandler = self._text
        self.expat.buffer_text = True
        self.expat.StartDoctypeDeclHandler = self._doctype
        self.expat.EntityDeclHandler = self._entity
        self.root: Element | None = None
        self.open: list[Element] = []
        self.count = 0

    def _place(self) -> str:
        return f"line {self.expat.CurrentLineNumber}, column {self.expat.CurrentColumnNumber + 1}"

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.count += 1
        if self.count > MAX_ELEMENTS:
            raise InputError(f"{self._place()}: more than {MAX_ELEMENTS:,} elements")
        if len(self.open) >= MAX_DEPTH:
            raise InputError(f"{self._place()}: elements are nested more than {MAX_DEPTH} deep")
        element = Element(name=cleaned(name), attributes=attributes, line=self.expat.CurrentLineNumber)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def _end(self, _: str) -> None:
        self.open.pop()

    def _text(self, data: str) -> None:
        if self.open:
            self.open[-1].text += data
            if len(self.open[-1].text) > MAX_TEXT:
                raise InputError(f"{self._place()}: more than {MAX_TEXT:,} characters of text in one element")

    def _doctype(self, _name: str, _system: str | None, _public: str | None, has_internal_subset: bool) -> None:
        if has_internal_subset:  # hwloc references an external subset, which expat does not read
            raise InputError(f"{self._place()}: declares a document type of its own, which no such tool writes")

    def _entity(self, name: str, *_: object) -> None:
        raise InputError(f"{self._place()}: declares the entity {shown(name)}, which no such tool writes")


def read_elements(text: str, root: str) -> Element:
    """Return the tree of an XML text with the root element `root`; errors contain line and column."""
    reader = _Reader()
    # The declared encoding does not apply to text that is already decoded.
    text = re.sub(r"\A\ufeff?\s*<\?xml[^>]{0,200}\?>", lambda match: "\n" * match[0].count("\n"), text)
    try:
        reader.expat.Parse(text.encode("utf-8"), True)
    except UnicodeEncodeError:
        raise InputError("contains text that is not Unicode") from None
    except expat.ExpatError as error:
        problem = expat.ErrorString(error.code)
        raise InputError(f"not valid XML: {problem} (line {error.lineno}, column {error.offset + 1})") from None
    if reader.root is None or reader.root.name != root:
        root_name = shown(reader.root.name) if reader.root else "nothing"
        raise InputError(f"line 1: the outermost element must be <{root}>, got {root_name}")
    return reader.root
