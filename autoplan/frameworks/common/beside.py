"""Files referenced by a launch file, found in its folder or a parent folder."""

from __future__ import annotations

from pathlib import Path

from autoplan.base.files import is_file, read_text
from autoplan.frameworks.common.options import show
from autoplan.frameworks.common.shell_words import is_open

MAX_ABOVE = 6  # folders above a script in which the file is looked for that it names
MAX_BYTES = 2**20


def read_beside(file: str, folder: Path | None) -> tuple[str, str] | None:
    """Return (text, path) of the file referenced by a launch file in `folder`; None if it cannot be found."""
    path = path_beside(file, folder)
    return (read_text(path, most_bytes=MAX_BYTES), show(str(path))) if path else None


def path_beside(file: str, folder: Path | None) -> Path | None:
    """Return the file referenced by a launch file in `folder`; None if it cannot be found.

    A file with an absolute path is looked for by its name, beside the launch file alone.
    """
    is_absolute = Path(file).is_absolute()
    parts = (Path(file).name,) if is_absolute else Path(file).parts
    num_up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    path = Path(*parts[num_up:])
    if folder is None or is_open(file) or ".." in path.parts:
        return None
    places = (folder, *(() if is_absolute else folder.absolute().parents[:MAX_ABOVE]))[num_up:]
    return next((place / path for place in places if is_file(place / path)), None)
