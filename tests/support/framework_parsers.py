"""Asks frameworks themselves, each in a process of its own: a test by `ask`, the script of a framework by `answer`.

Packages that need a GPU to be imported are stood in for by modules whose every name exists.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def ask(script: str, questions: Sequence[Any], *words: str, environment: Mapping[str, str] | None = None) -> list[Any]:
    """Answers of the script of a framework to each question; {"error": ...} is a refusal."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), *words],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    answers: list[Any] = json.loads(result.stdout)
    assert len(answers) == len(questions)
    return answers


def answer(prepare: Callable[[], Callable[[Any], Any]]) -> None:
    """Write what the function that `prepare` gives makes of each question; what else is printed goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    made_of, answers = prepare(), []
    for asked in json.load(sys.stdin):
        try:
            answers.append(made_of(asked))
        except (Exception, SystemExit) as error:
            answers.append({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})
    json.dump(answers, out, default=str)


def stand_in(*packages: str) -> None:
    """Let these packages be imported though they are not here; torch itself is told that triton is not."""
    import torch.utils.flop_counter  # noqa: F401  (uses triton where it seems to be there)
    from torch.utils import _triton

    for probe in ("has_triton_package", "has_triton"):  # cached answers, before the stand-in exists
        getattr(_triton, probe, bool)()
    sys.meta_path.append(_Finder(packages))


class _Names(abc.ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(types.ModuleType):
    """A module in which everything exists, and whose calls return functions."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inside = {"__init__": lambda *_, **__: None, "__class_getitem__": classmethod(lambda cls, _: cls)}
        return _Names(name, (), inside) if name[0].isupper() else _Anything(name)

    def __call__(self, *words: Any, **named: Any) -> Any:
        return words[0] if words and callable(words[0]) and not named else lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_one = any(name == package or name.startswith(f"{package}.") for package in self._packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_one else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
