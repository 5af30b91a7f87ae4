"""Commands of a bash script, found by following variables, arrays, conditions and here-documents without running it.

This is not a shell: nothing is executed, and no file is opened but scripts that it sources from its own folder or one
above.  What only a running shell knows (an environment variable, the output of a command) stays in the words as
written, so that a reader can name it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path, PurePath

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.environment import unread_variables, variables_in
from autoplan.frameworks.common.launch import LaunchContext, Unread
from autoplan.frameworks.common.shell_tokens import ASSIGNMENT, MAX_DEPTH, NAME, Token, tokens_of
from autoplan.frameworks.common.shell_words import MAX_CHARACTERS, Value, Variables, is_number, is_open

_LIST = ("&&", "||")
_DIRECTIVE = re.compile(r"^[ \t]*#SBATCH[ \t]+(.*?)[ \t]*(?: #.*)?$", re.MULTILINE)
_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_TASKS = ("SLURM_NTASKS_PER_NODE",)
# Options of sbatch, and the variables of the job that they set (man sbatch, output environment variables).
_DIRECTIVES = {
    **dict.fromkeys(("--nodes", "-N"), _NODES),
    **dict.fromkeys(("--gpus-per-node", "--gres"), _GPUS),
    "--ntasks-per-node": _TASKS,
}
SUFFIXES = (".sh", ".slurm", ".sbatch", ".bash")  # of scripts
CASE = "case "  # begins a named branch of a choice among several, of which none is read
FIRST_ROUND = " (the first round is read)"  # behind the name of a loop's variable
_LAST = "start training with different arguments: the last one is read"
UNDECIDED = "only known in a running shell"  # why a condition is listed
_OF_A_JOB = (*_NODES, *_GPUS, *_TASKS)
_SUBMISSION = re.compile(r"=\"?\$\(((?:.*[ /;&])?(?:sbatch|qsub) .*)\)\"?$", re.DOTALL)  # of a job whose number is kept
MAX_SOURCED = 20  # scripts that one script may source
# Scripts that prepare the shell rather than the run: of an environment, a module system, a user.
_OF_THE_SHELL = re.compile(
    r"^(/(etc|opt|usr|bin|lib\w*|var|proc|sw|soft\w*|apps?|cvmfs)/.*|~/\.[^/]*"
    r"|.*\b(activate|.*rc|.*profile|conda\.sh|modules?\.sh|setvars\.sh|set_env\.sh|setenv\.\w+))$"
)
_DECLARES = ("export", "declare", "local", "readonly", "typeset")


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one simple command, expanded; `text` is its here-document, `environment` what it may see."""

    words: tuple[str, ...]
    text: str = ""
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Script:
    """Content of a script: its commands in order, its variables at the end, and what could not be decided.

    `missing` are the scripts that it sources and that were not found, `environment` what its commands may see.
    """

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, Value] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    num_starts: int = 0  # of the program that is looked for, with different arguments

    def unread(self) -> list[Unread]:
        """Return the conditions, files and variables of the environment that were not read."""
        why = "not found beside this file: pass --set NAME=VALUE for what it sets"
        return [
            *(Unread(option=item, value="", why=UNDECIDED, matters=False) for item in dict.fromkeys(self.open)),
            *(Unread(option=f"source {file}", value="", why=why) for file in self.missing),
            *unread_variables(self.environment),
            *[Unread(option=f"{self.num_starts} commands", value="", why=_LAST)] * (self.num_starts > 1),
        ]


def read_script(
    text: str,
    fixed: Sequence[tuple[str, str]] = (),
    folder: Path | None = None,
    assumed: tuple[str, bool] | None = None,
) -> Script:
    """Commands of a bash script in `folder` with Slurm's directives; it assigns none of the `fixed` variables.

    Of a condition that only a running shell decides no branch is read, unless `assumed` says whether it holds.
    """
    variables = Variables(slurm_variables(text), dict(fixed))
    state = _State(variables, folder, assumed)
    state.run(text, 0)
    environment: dict[str, str] = {}
    for command in state.commands:
        if command.words[:1] not in (("echo",), ("printf",)):
            environment |= dict(command.environment) | variables_in(command.words)
    return Script(state.commands, variables.values, state.open, state.missing, environment)


def script_of(text: str, context: LaunchContext) -> Script:
    """Commands of a script of a launch."""
    return read_script(text, context.variables, context.folder, context.assumed)


def slurm_variables(text: str) -> dict[str, Value]:
    """Variables of a job that follow from its lines '#SBATCH --nodes=2', '--gpus-per-node=h100:8' and the like."""
    variables: dict[str, Value] = {}
    for line in _DIRECTIVE.findall(text):
        for option, value in re.findall(r"(-[A-Za-z]|--[a-z-]+)[= ]*([\w:.-]+)?", line):
            count = (value or "").rpartition(":")[2]
            if option in _DIRECTIVES and count.isdecimal():
                variables |= dict.fromkeys(_DIRECTIVES[option], count)
    return variables


class _State:
    """Commands so far.  Of loops the first round is read, of conditions the branch that holds."""

    def __init__(self, variables: Variables, folder: Path | None, assumed: tuple[str, bool] | None) -> None:
        self._variables, self._folder, self._assumed = variables, folder, assumed
        self._num_sourced = 0
        self._exported: set[str] = set()
        self._exports_all = False
        self._has_left = False  # whether the round of a loop that was read last ended it
        self.missing: list[str] = []
        self.commands: list[Command] = []
        self.open: list[str] = []
        self.size = 0

    def run(self, text: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise InputError(f"a script is nested more than {MAX_DEPTH} deep")
        tokens = tokens_of(text)
        at = 0
        while at < len(tokens):
            at = self._block(tokens, at, (), True, depth) + 1

    def _block(self, tokens: list[Token], at: int, ends: tuple[str, ...], runs: bool, depth: int) -> int:
        """Reads statements up to one of the words in `ends`; where it stands comes back."""
        if depth > MAX_DEPTH:
            raise InputError(f"a script is nested more than {MAX_DEPTH} deep")
        goes_on = True
        while at < len(tokens):
            token = tokens[at]
            if token.raw in ends and token.kind in ("word", "operator"):
                return at
            if token.kind == "operator":
                goes_on = goes_on if token.raw in _LIST else True
                at += 1
            elif token.raw == "if":
                at = self._if(tokens, at + 1, runs, depth + 1)
            elif token.raw in ("for", "while", "until", "select"):
                at = self._loop(tokens, at, runs, depth + 1)
            elif token.raw == "case":
                at = self._case(tokens, at + 1, runs, depth + 1)
            elif token.raw in ("{", "}", "function", "then", "do", "done", "fi", "esac"):
                at += 1
            else:
                command, at = self._simple(tokens, at)
                status = self._do(command, depth) if runs and goes_on else None
                if at < len(tokens) and tokens[at].raw in _LIST and tokens[at].kind == "operator":
                    if status is None and runs and goes_on and command and command[0].raw in ("[", "[[", "test"):
                        status = self._undecided(command, behind=f" {tokens[at].raw}")
                    # What is joined by && follows unless the first part is known to fail; || only where it is.
                    goes_on = goes_on and (status is not False if tokens[at].raw == "&&" else status is False)
        return at

    def _simple(self, tokens: list[Token], at: int) -> tuple[list[Token], int]:
        """The tokens of one command; redirections and their targets are left out."""
        command: list[Token] = []
        test = tokens[at].raw == "[["
        while at < len(tokens):
            token = tokens[at]
            if token.kind == "operator":
                if test and token.raw != "\n":
                    command.append(token)
                elif token.raw in ("<", ">", ">>", ">&", "<&", "&>", "&>>", "<<<"):
                    at += 1
                elif token.raw == "\n" and at + 1 < len(tokens) and tokens[at + 1].kind.endswith("text"):
                    pass
                else:
                    return command, at
            elif token.kind.endswith("text"):
                command.append(token)
            else:
                command.append(token)
                if test and token.raw == "]]":
                    return command, at + 1
            at += 1
        return command, at

    def _if(self, tokens: list[Token], at: int, runs: bool, depth: int) -> int:
        decided: bool | None = False  # whether a branch has been taken
        while at < len(tokens):
            start = at
            at = self._block(tokens, at, ("then",), False, depth) + 1
            holds = self._condition(tokens[start : at - 1]) if runs and decided is False else False
            if holds is None and (holds := self._undecided(tokens[start : at - 1], "if ")) is None:
                decided = None
            at = self._block(tokens, at, ("elif", "else", "fi"), runs and decided is False and holds is True, depth)
            decided = True if decided is False and holds else decided
            if at < len(tokens) and tokens[at].raw == "else":
                at = self._block(tokens, at + 1, ("fi",), runs and decided is False, depth)
            if at >= len(tokens) or tokens[at].raw == "fi":
                return at + 1
            at += 1
        return at

    def _undecided(self, tokens: list[Token], before: str = "", behind: str = "") -> bool | None:
        """Note a condition that only a running shell decides; return what is assumed of it, if anything is."""
        words = " ".join(token.raw for token in tokens if token.raw.strip("\n;"))[:60]
        return self._is_assumed(f"{before}{words}{behind}")

    def _is_assumed(self, condition: str) -> bool | None:
        """Note a condition that is not decided, unless something is assumed of it, which is returned."""
        if self._assumed is not None and self._assumed[0] == condition:
            return self._assumed[1]
        self.open.append(condition)
        return None

    def _loop(self, tokens: list[Token], at: int, runs: bool, depth: int) -> int:
        start = at
        while at < len(tokens) and tokens[at].raw != "do":
            at += 1
        head = [token.raw for token in tokens[start:at] if token.kind == "word"]
        if runs and len(head) > 3 and head[0] == "for" and head[2] == "in":
            values = [value for raw in head[3:] for value in self._variables.fields(raw)]
            self._variables.assign(head[1], values[0] if values else "")
            if len(values) > 1:
                self.open.append(f"for {head[1]}{FIRST_ROUND}")
        elif runs and head[0] == "while" and self._condition(tokens[start + 1 : at]) is False:
            runs = False
        given, self._has_left = self._variables.arguments(), False
        end = self._block(tokens, at + 1, ("done",), runs, depth)
        # Loops over the arguments of the script take them away one by one.
        while runs and head[0] == "while" and len(self._variables.arguments()) < len(given):
            given = self._variables.arguments()
            if self._has_left or not self._condition(tokens[start + 1 : at]):
                break
            self._block(tokens, at + 1, ("done",), runs, depth)
        return end + 1

    def _case(self, tokens: list[Token], at: int, runs: bool, depth: int) -> int:
        subject = self._variables.text(tokens[at].raw) if at < len(tokens) else ""
        at += 1
        has_matched = False
        while at < len(tokens) and tokens[at].raw in ("in", "\n"):
            at += 1
        while at < len(tokens) and tokens[at].raw != "esac":
            patterns = []
            while at < len(tokens) and tokens[at].raw != ")":
                if tokens[at].kind == "word":
                    patterns.append(self._variables.text(tokens[at].raw))
                at += 1
            holds = any(fnmatchcase(subject, pattern) for pattern in patterns)
            if runs and not holds and not has_matched and is_open(subject):
                holds = self._is_assumed(f"{CASE}{subject[:30]} in {'|'.join(patterns)[:30]})") is True
            holds = holds and not has_matched
            has_matched = has_matched or holds
            at = self._block(tokens, at + 1, (";;", "esac"), runs and holds, depth)
            while at < len(tokens) and tokens[at].raw in (";;", "\n"):
                at += 1
        return at + 1

    def _do(self, tokens: list[Token], depth: int) -> bool | None:
        """Carries out an assignment, notes a command; whether it succeeds, where that can be told."""
        if tokens[0].raw in _DECLARES:  # its words are flags, names and assignments
            if tokens[0].raw == "export" or any(re.fullmatch(r"-\w*x\w*", token.raw) for token in tokens):
                self._exported |= {name[0] for token in tokens[1:] if (name := re.match(NAME, token.raw))}
            is_map = any(re.fullmatch(r"-\w*A\w*", token.raw) for token in tokens)
            for token in tokens:
                if is_map:
                    self._set_entries(token)
                else:
                    self._set(token)
            return True
        at = 0
        while at < len(tokens) and (tokens[at].kind == "array" or self._is_set(tokens[at])):
            self._set(tokens[at])
            at += 1
        of_the_command = {name[0] for token in tokens[:at] if (name := re.match(NAME, token.raw))}
        if at == len(tokens):
            for submission in filter(None, (_SUBMISSION.search(token.raw) for token in tokens)):
                self.run(submission[1], depth + 1)
            return True
        tokens = tokens[at:]
        if tokens[0].raw == ":":
            for token in tokens[1:]:
                self._variables.fields(token.raw)  # which assigns the default of ${NAME:=default}
            return True
        if tokens[0].raw in ("[", "[[", "test", "true", "false", "!"):
            return self._condition(tokens)
        words = tuple(word for token in tokens if token.kind == "word" for word in self._variables.fields(token.raw))
        if words[:1] == ("break",):
            self._has_left = True
            return True
        if words[:1] == ("shift",):
            self._variables.shift(int(words[1]) if len(words) > 1 and is_number(words[1]) else 1)
            return True
        if words[:1] == ("set",):
            self._exports_all |= any(re.fullmatch(r"-[a-z]*a[a-z]*|allexport", word) for word in words[1:])
        if words and words[0] == "unset":
            for variable in words[1:]:
                self._variables.values.pop(variable, None)
            return True
        text = "".join(
            self._variables.text(token.raw, quoted=True) if token.kind == "text" else token.raw
            for token in tokens
            if token.kind.endswith("text")
        )
        self.size += sum(map(len, words)) + len(text)
        if self.size > MAX_CHARACTERS:
            raise InputError(f"the commands of the script are longer than {MAX_CHARACTERS:,} characters")
        if words[:1] in (("source",), (".",)) and len(words) > 1:
            self._source(words[1], depth)
        elif words and words[0] == "read" and text:
            self._read(words[1:], text)
        elif words and words[0] == "eval":
            self.run(" ".join(words[1:]), depth + 1)
        elif words or text:
            self.commands.append(Command(words, text, self._environment(of_the_command)))
        return None

    def _environment(self, of_the_command: set[str]) -> tuple[tuple[str, str], ...]:
        """Return what a command sees of the variables: those exported, its own, and those of a job."""
        seen = self._variables.values.keys() if self._exports_all else self._exported | of_the_command | {*_OF_A_JOB}
        values = {name: self._variables.values.get(name) for name in seen if not name.isdecimal()}
        return tuple((name, value) for name, value in sorted(values.items()) if isinstance(value, str))

    def _source(self, file: str, depth: int) -> None:
        """Read a script that this one runs in its own shell, found in its folder or one above it."""
        self._num_sourced += 1
        if self._num_sourced > MAX_SOURCED:
            raise InputError(f"the script sources more than {MAX_SOURCED} others")
        if found := read_beside(PurePath(file).as_posix(), self._folder):
            self.run(found[0], depth + 1)
        elif not _OF_THE_SHELL.match(file):
            self.missing.append(file)

    def _read(self, words: tuple[str, ...], text: str) -> None:
        """Assign what `read` takes of a here-document: all of it with -d '', else its first line."""
        names = [word for word in words if re.fullmatch(NAME, word)]
        is_whole = any(re.fullmatch(r"-[a-z]*d", word) and follows == "" for word, follows in pairwise(words))
        if len(names) == 1:
            self._variables.assign(names[0], (text if is_whole else text.partition("\n")[0]).strip())

    def _is_set(self, token: Token) -> bool:
        return token.kind == "word" and ASSIGNMENT.match(token.raw) is not None

    def _set_entries(self, token: Token) -> None:
        """Assign the entries of an associative array: `declare -A OPTIONS=([tp]=4 [pp]=2)`."""
        for item in token.items:
            if entry := re.fullmatch(r"\[([^\]]+)\]=(.*)", item, re.DOTALL):
                self._variables.assign_entry(token.raw, entry[1], self._variables.text(entry[2]))

    def _set(self, token: Token) -> None:
        if token.kind == "array":
            name, adds = token.raw.removesuffix("+"), token.raw.endswith("+")
            items = [item for raw in token.items for item in self._variables.fields(raw)]
            before = self._variables.items(name) if adds else []
            self._variables.assign(name, [*before, *items])
        elif match := ASSIGNMENT.match(token.raw):
            text = self._variables.text(token.raw[match.end() :])
            if match[2] is not None and not match[2].isdecimal():
                self._variables.assign_entry(match[1], match[2], text)
            elif match[2] is not None:
                items = self._variables.items(match[1])
                items[int(match[2]) : int(match[2]) + 1] = [text]
                self._variables.assign(match[1], items)
            else:
                self._variables.assign(match[1], " ".join(self._variables.items(match[1])) + text if match[3] else text)

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _condition(self, tokens: list[Token]) -> bool | None:
        """Return whether tests joined by && and || hold; None where that cannot be told."""
        holds: bool | None = True
        joint = "&&"
        part: list[Token] = []
        for token in [*tokens, Token("operator", ";")]:
            if token.kind != "operator" or token.raw in ("(", ")", "<", ">"):
                part.append(token)
                continue
            if part:
                value = self._test([item.raw for item in part])
                if joint == "&&":
                    holds = False if False in (holds, value) else None if None in (holds, value) else True
                else:
                    holds = True if True in (holds, value) else None if None in (holds, value) else False
                part = []
            if token.raw in _LIST:
                joint = token.raw
        return holds

    def _test(self, raws: list[str]) -> bool | None:
        words = [raw for raw in raws if raw not in ("[", "]", "[[", "]]", "test", "(", ")")]
        if words[:1] == ["!"]:
            value = self._test(words[1:])
            return None if value is None else not value
        if not words:
            return True
        if len(words) == 1:
            if raws[0] in ("[", "[[", "test"):
                return bool(self._variables.text(words[0], unset=""))
            return {"true": True, ":": True, "false": False}.get(words[0])
        if len(words) == 2 and words[0] in ("-n", "-z"):
            return bool(self._variables.text(words[1], unset="")) is (words[0] == "-n")
        if len(words) != 3:
            return None
        left, sign, right = self._variables.text(words[0], unset=""), words[1], self._variables.text(words[2], unset="")
        if is_open(left) or is_open(right):
            return None
        if sign in ("=", "==", "!="):
            if any(is_open(self._variables.text(word)) for word in (words[0], words[2])):
                self.open.append(f"{' '.join(words)[:60]} (what is not set is taken as empty)")
            is_equal = fnmatchcase(left, right) if raws[0] == "[[" else left == right
            return is_equal is (sign != "!=")
        numbers = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
        if sign in numbers and is_number(left) and is_number(right):
            a, b = int(left), int(right)
            return {"==": a == b, "!=": a != b, ">": a > b, ">=": a >= b, "<": a < b, "<=": a <= b}[numbers[sign]]
        return None
