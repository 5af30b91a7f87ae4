"""Are the commands of a bash script read as bash would start them?  Bash itself says what it would start."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.frameworks.common.shell import read_script

SAME = {
    "words": "start a 'b c' \"d e\" f\\ g",
    "continuation": "start a \\\n  b\\\n c",
    "comments": "# no\nstart a # b\n#start c",
    "variables": 'A=1\nB="$A 2"\nstart $A $B "$B" ${A}x',
    "defaults": 'A=${A:-7}\nB=${B:="8 9"}\nC=\nstart $A $B ${C:-c} ${C-d} ${A:+set} "${NONE:+no}"',
    "nested defaults": 'P=${P:-${Q:-${R:-5}}}\nstart "$P" ${S:-"a b"} ${S:-a b}',
    "arrays": 'A=(a "b c"\n # no\n d)\nA+=(e)\nstart ${A[@]} "${A[@]}" "${#A[@]}" ${A[1]} "x${A[*]}y"',
    "places in arrays": "A=(a b c) I=1 K=0\nstart ${A[$I]} ${A[I]} ${A[$((I + 1))]} ${A[-1]} x${A[7]}",
    "arrays of options": 'A=("--fp8-format hybrid" --bf16)\nstart ${A[@]}',
    "appended text": 'A="--a 1"\nA+=" --b 2"\nstart $A',
    "arithmetic": "N=4 G=8\nstart $((N * G)) $(($N*$G/3)) $((-7 / 2)) $((-7 % 3)) $(( (N + 1) * 2 ))",
    "expr": "N=4\nstart $(expr 16 / $N) $(expr $N \\* 3 + 1) $( expr 7 - 2 )",
    "quotes": "A='$B'\nstart \"$A\" '$A' \"\\$A\" \"a'b\" 'a\"b'",
    "if": 'A=x\nif [[ "$A" == "x" ]]; then start yes; else start no; fi\nif [ $A = y ]; then start no; fi',
    "elif": "A=2\nif [ $A -eq 1 ]; then start one\nelif [ $A -eq 2 ]; then start two\nelse start more; fi",
    "patterns": "A=llama3-8b\nif [[ $A == llama* && -n $A ]]; then start yes; fi\n[[ -z $B || $A == b ]] && start also",
    "chains": "[ 1 = 2 ] && start no\n[ 1 = 2 ] || start yes\n[ 1 = 1 ] && A=3\nstart $A",
    "case": "A=b\ncase $A in a) start a;; b|c) start bc;; *) start rest;; esac",
    "functions and groups": "f() { start inside; }\nf\n{ start group; }",
    "redirections": "start a >/dev/null 2>&1 </dev/null\nstart b | cat",
    "case of letters": "A=Bf16\nstart ${A,,} ${A^^}",
    "eval": 'A="start a"\neval "$A b"',
    "declared": 'declare -a A=(a "b c")\nA+=(d)\nreadonly -a B=(e)\ndeclare -r C=f\nstart "${A[@]}" ${B[@]} $C',
    "exported": "export A=1 B='2 3'\nstart $A $B",
    "read of a here-document": "T=4\nread -r -d '' A <<END\n --tp $T\n --pp 2\nEND\nread B <<< x\nstart $A",
    "defaults by colon": ': "${A:=4}" ${B:=5}\nstart $A $B',
    "lists without items": 'A=()\nstart a "$@" "${A[@]}" "x${A[@]}" b',
    "nothing": 'A=\nstart $A "$A" x',
}


def started_by_bash(text: str) -> list[list[str]]:
    """The words of every `start`, in order, from a shell that has nothing else."""
    stand_in = 'start() { printf "%s\\0" "$#" "$@" >&3; }\n'
    result = subprocess.run(
        ["bash", "-c", f"exec 3>&1 >/dev/null\n{stand_in}{text}"],
        capture_output=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    words = result.stdout.decode().split("\0")[:-1]
    found = []
    while words:
        count = int(words[0])
        found.append(words[1 : count + 1])
        words = words[count + 1 :]
    return found


def started(text: str, *given_: tuple[str, str]) -> list[list[str]]:
    return [
        list(command.words[1:]) for command in read_script(text, given_).commands if command.words[:1] == ("start",)
    ]


@pytest.mark.parametrize("name", SAME)
def test_a_script_starts_what_bash_starts(name: str) -> None:
    expected = started_by_bash(SAME[name])
    if name == "functions and groups":
        expected = [["inside"], ["group"]]  # a function is read where it stands
    if name == "nothing":
        expected = [["", "x"]]
    assert expected
    assert started(SAME[name]) == expected


plain = st.text(st.sampled_from("ab \"'\\$*;&|<>(){}#~!-=/\t"), max_size=12)


@given(st.lists(plain, min_size=1, max_size=4))
def test_quoted_words_are_read_as_they_are(words: list[str]) -> None:
    assert started(f"start {shlex.join(words)}") == [words]


def test_what_only_a_running_shell_knows_stays_as_it_is_written() -> None:
    script = read_script('start $NONE "${1}" $(nproc) `hostname` $((UNKNOWN * 2)) ${A:?must be set}')
    (command,) = script.commands
    assert command.words[1:] == ("$NONE", "${1}", "$(nproc)", "`hostname`", "$((UNKNOWN * 2))", "${A:?must be set}")
    assert started("A=(1 2)\nstart ${A[$SLURM_ARRAY_TASK_ID]}") == [["${A[$SLURM_ARRAY_TASK_ID]}"]]


@pytest.mark.parametrize("place", ["$0", "${BASH_SOURCE[0]}", "$BASH_SOURCE"])
def test_the_folder_of_a_script_is_where_paths_begin(place: str) -> None:
    for folder in (f'$(cd "$(dirname "{place}")" && pwd)', f"$(dirname {place})"):
        assert started(f"HERE={folder}\nstart $HERE/ds.json") == [["./ds.json"]]


HERE = [
    '$(cd "$(dirname "$0")" && pwd)',
    '$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)',
    '$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd -P)',
]


def test_placeholders_of_a_template_are_words() -> None:
    script = read_script("SAVE=<path to checkpoints>\nN=8\nstart --load <PATH TO a.json> --fp16 -n $N <in >out\n")
    assert script.commands[0].words == ("start", "--load", "<PATH TO a.json>", "--fp16", "-n", "8")
    assert script.variables["SAVE"] == "<path to checkpoints>"


@pytest.mark.parametrize("here", HERE)
def test_sourced_scripts_set_variables_as_in_bash(here: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text(
        'source "${HERE}/sizes.sh"\nMODEL_ARGS=(--num-layers $LAYERS "a b")\n'
    )
    (tmp_path / "sizes.sh").write_text("LAYERS=${LAYERS:-28}\n")
    script = tmp_path / "run.sh"
    script.write_text(f'HERE="{here}"\nsource "${{HERE}}/models/small.sh"\nstart "${{MODEL_ARGS[@]}}"\n')
    text = script.read_text()
    result = subprocess.run(
        ["bash", "-c", f'start() {{ printf "%s|" "$@"; }}; export -f start; bash {shlex.quote(str(script))}'],
        capture_output=True,
        check=True,
        text=True,
    )
    (command,) = read_script(text, folder=tmp_path).commands
    assert "".join(f"{word}|" for word in command.words[1:]) == result.stdout == "--num-layers|28|a b|"
    # A script in a folder below, and a variable that a person gives.
    (tmp_path / "jobs").mkdir()
    below = read_script(text, [("LAYERS", "4")], tmp_path / "jobs")
    assert below.commands[-1].words[1:] == ("--num-layers", "4", "a b")


def test_the_folder_above_a_script_is_found_too(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "sizes.sh").write_text("LAYERS=28\n")
    (tmp_path / "jobs" / "sizes.sh").write_text("LAYERS=1\n")
    root = '"$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../jobs/.." >/dev/null 2>&1 && pwd)"'
    for place in ("../sizes.sh", "$(dirname $0)/../sizes.sh"):
        script = read_script(f"source {place}\nstart $LAYERS", folder=tmp_path / "jobs")
        assert script.commands[-1].words == ("start", "28")
    assert read_script(f"source {root}/sizes.sh", folder=tmp_path / "jobs").missing  # not followed, and said


def test_scripts_that_were_not_found_are_listed_but_for_those_of_the_shell(tmp_path: Path) -> None:
    text = (
        "source conf/env.sh\n. ./sizes.sh\nsource venv/bin/activate\nsource ~/.bashrc\nsource /etc/profile.d/modules.sh"
    )
    script = read_script(text, folder=tmp_path)
    assert (script.missing, script.commands) == (["conf/env.sh", "./sizes.sh"], [])
    for other in ("../secret.sh", "/root/slime/scripts/models/qwen3-8B.sh", "~/models.sh", ".env"):
        assert read_script(f"source {other}", folder=tmp_path).missing == [other]


def test_scripts_that_source_themselves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.sh").write_text("source loop.sh\n")
    with pytest.raises(InputError, match="sources more than 20 others"):
        read_script("source loop.sh", folder=tmp_path)


def test_options_in_a_string_are_parted_whatever_only_a_running_shell_knows_of_them() -> None:
    script = read_script('A="--nnodes 2 --node-rank $(f 1 2) --addr $ADDR:${PORT:?no port} `g h`x"\nstart $A')
    words = ("--nnodes", "2", "--node-rank", "$(f 1 2)", "--addr", "$ADDR:${PORT:?no port}", "`g h`x")
    assert script.commands[0].words[1:] == words


def test_what_a_person_gives_wins() -> None:
    assert started("N=1\nstart $N ${M:-2}", ("N", "4"), ("M", "5")) == [["4", "5"]]


def test_what_cannot_be_decided_is_listed_and_neither_branch_is_read() -> None:
    script = read_script("if [ -f data ]; then start a; else start b; fi\nfor x in 1 2; do start $x; done")
    assert [command.words for command in script.commands] == [("start", "1")]
    assert script.open == ["if [ -f data ]", "for x (the first round is read)"]


def test_what_is_compared_without_being_set_is_listed_and_maps_are_expanded() -> None:
    script = read_script(
        'if [ "$1" = big ]; then start a; else start b; fi\ncase $2 in x) start x ;; *) start y ;; esac'
    )
    assert [command.words for command in script.commands] == [("start", "b"), ("start", "y")]
    assert [line.partition(" (")[0] for line in script.open] == ['"$1" = big', "case $2 in x)"]
    assert started("declare -A M=([k]=v)\nstart ${M[k]}") == [["v"]]


def test_here_documents_belong_to_their_command() -> None:
    text = "A=7\nsbatch <<EOF\n#SBATCH --nodes=2\nstart $A\nEOF\ncat <<'E'\n$A\nE\nstart b"
    script = read_script(text)
    assert script.commands[0].words == ("sbatch",)
    assert script.commands[0].text == "#SBATCH --nodes=2\nstart 7\n"
    assert script.commands[1].text == "$A\n"
    assert script.commands[2].words == ("start", "b")


def test_variables_that_slurm_sets_follow_from_the_directives() -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:h100:8 # all\n#SBATCH --ntasks-per-node 1 --time=9\n"
    line = "start $SLURM_NNODES $SLURM_GPUS_ON_NODE ${SLURM_NTASKS_PER_NODE:-7} $SLURM_PROCID"
    assert started(head + line) == [["2", "8", "1", "$SLURM_PROCID"]]
    assert started("#SBATCH -N 4\n" + line, ("SLURM_NNODES", "3"))[0][0] == "3"
    assert started("SLURM_NNODES=5\n" + line)[0][0] == "5"


def test_nothing_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read_script("touch a; $(touch b) `touch c`; eval 'touch d'; x=$(touch e); : ${Y:=$(touch f)}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "a" + "".join(f"\nA{n}=$A{n - 1}$A{n - 1}$A{n - 1}$A{n - 1}" for n in range(1, 40)).replace("$A0", "xxxx"),
        "${" * 2000,
        "$(" * 2000,
        '"' * 3001,
        "if " * 2000,
        "(" * 5000,
        "A=(" * 500,
        "for x in " * 500,
        "case a in " * 500,
        "cat <<A\n" * 500,
        "start $((" + "(" * 500 + "1" + ")" * 500 + "))",
        "start $((9 ** 9 ** 9))",
        "eval " * 50 + "start",
    ],
)
def test_hostile_scripts_end(text: str) -> None:
    with contextlib.suppress(InputError):
        assert read_script(text).commands is not None


@given(st.text(st.sampled_from("ab1 \n\"'\\$(){}[]<>;&|=#`+-*:?@EOF"), max_size=60))
def test_any_text_is_read_or_refused_by_our_own_error(text: str) -> None:
    with contextlib.suppress(InputError):
        read_script(text)
