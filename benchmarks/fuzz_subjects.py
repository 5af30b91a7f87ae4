"""What the fuzzer reads: files of every kind to start from, what reads them, and what is done with what they say."""

from __future__ import annotations

import gzip
import io
import json
import random
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copy, copytree, rmtree

import autoplan
from autoplan.api.plan_files import make_plan_file
from autoplan.base.errors import InputError
from autoplan.base.files import encode, shipped
from autoplan.base.units import GIB
from autoplan.cli import main
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.launch import Launch, LaunchContext, Reader
from autoplan.frameworks.launch_files import READERS
from autoplan.frameworks.logs import Batch, LogReader
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.frameworks.registry import TARGETS
from autoplan.jobs.template import load_job_template
from autoplan.launch.targets import exported
from autoplan.profiler.discover.describe import describe
from autoplan.profiler.discover.observed import ObservedNode
from autoplan.profiler.discover.report import read_source
from autoplan.profiler.discover.write import cluster_toml
from autoplan.profiler.imports import read_source as read_timings
from autoplan.profiler.imports.traces import read_ranks
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import open_store
from autoplan.profiler.store.exchange import read_exchange, write_exchange
from autoplan.readers.calibration import load_calibration
from autoplan.readers.cluster import load_cluster, of_size
from autoplan.readers.huggingface import model_types
from autoplan.readers.lengths import load_lengths
from autoplan.readers.mixed_cluster import load_parts
from autoplan.readers.model import load_model
from autoplan.runs.predictions import predict_runs, prediction_table
from autoplan.search.ranking import ranked
from autoplan.spec.enums import ContextParallelKind, Recompute, Schedule, Sharding
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.graph import quotient

DATA = Path(__file__).parent.parent / "tests" / "data"
MAX_CHARACTERS = 2**16  # of one file

PLANS = (
    ParallelPlan(global_batch=64, dp_shard=8),
    ParallelPlan(global_batch=64, dp_shard=8, sharding=Sharding.ZERO3),
    ParallelPlan(global_batch=64, dp_shard=4, tp=2, sp=True),
    ParallelPlan(global_batch=64, dp_shard=4, tp=2, sharding=Sharding.ZERO2),
    ParallelPlan(global_batch=64, dp_shard=2, pp=4, recompute=Recompute.FULL),
    ParallelPlan(global_batch=64, pp=4, vp=2, schedule=Schedule.INTERLEAVED, dp_shard=2),
    ParallelPlan(global_batch=64, cp=2, cp_kind=ContextParallelKind.ALL_TO_ALL, dp_shard=4, sharding=Sharding.ZERO3),
    ParallelPlan(global_batch=64, ep=4, dp_shard=8),
)
# Lines of a step in the logs of frameworks: N is its number, S the samples so far, M the moment in milliseconds.
STEP_LINES = (
    " [2026-01-01 00:00:00] iteration {N:8d}/ 100 | consumed samples: {S:12d} |"
    " elapsed time per iteration (ms): 812.5 | throughput per GPU (TFLOP/s/GPU): 401.2 |"
    " global batch size:    64 | lm loss: 9.1E+00 |\n"
    "    forward-backward ...............................: (700.12, 720.25)",
    "[rank0]:[titan] 2026-01-01 00:00:{N:02d},000 - root - INFO - step: {N:2d}  loss:  7.1  memory: 40.1GiB(50.5%)"
    "  tps: 7,000  tflops: 400.1  mfu: 40.5%",
    "01/01/2026 00:00:00 [INFO|DP=0|PP=0|TP=0]: iteration: {N} / 100 | consumed_tokens: 786K |"
    " elapsed_time_per_iteration_ms: 900 | tokens_per_sec: 290K | global_batch_size: 64 | lm_loss: 10",
    "steps: {N} loss: 2.5000 iter time (s): 2.125 samples/sec: 30.118",
    "[2026-01-01 12:19:04,123] [INFO] [timer.py:264:stop] epoch=0/micro_step={N}/global_step={N},"
    " RunningAvgSamplesPerSec=30.0, CurrSamplesPerSec=31.5, MemAllocated=9.1GB, MaxMemAllocated=55.25GB",
    "time (ms) | fwd: 300.00 | bwd: 600.00 | bwd_inner: 500.00 | bwd_allreduce: 100.00 | step: 100.00",
    "\r {N}%|##        | {N}/100 [00:{N:02d}<01:30,  1.00s/it]{{'loss': 7.1, 'grad_norm': 1.5, 'epoch': 0.01}}",
    ':::MLLOG {{"time_ms": {M}, "key": "global_batch_size", "value": 64}}\n'
    ':::MLLOG {{"time_ms": {M}, "key": "block_stop", "value": null, "metadata": {{"samples_count": {S}}}}}\n'
    ':::MLLOG {{"time_ms": {M}, "key": "block_start", "value": null, "metadata": {{"samples_count": {S}}}}}',
)


@dataclass(frozen=True, slots=True)
class Seed:
    """A file to start from."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Subject:
    """Something that reads files, and the files to start from."""

    name: str
    seeds: Sequence[Seed]
    read: Callable[[Seed], object]
    is_watched: bool = False  # whether it may do nothing but read


def exports() -> Iterator[Seed]:
    """Files that export writes for some plans, for every target and version that takes them, and the plan files."""
    cluster, training = load_cluster("h100-sxm:4x8"), TrainingSpec(seq_len=4096)
    frameworks = {framework.rules: framework for framework in map(load_framework, reversed(preset_frameworks()))}
    for model in map(load_model, ("llama3-8b", "mixtral-8x7b")):
        for rules, framework in frameworks.items():
            problem = Problem(model=model, training=training, cluster=cluster, framework=framework)
            costs = estimate(problem, PlanBatch.of(PLANS[:1], model.num_layers))
            first = make_plan_file(problem, ranked(problem, costs, [0]), None)
            for plan in PLANS:  # the figures beside it stay those of the first
                file = replace(first, best=replace(first.best, plan=plan))
                yield Seed("plan.json", encode(file))
                for target in TARGETS.values():
                    for to in target.spellings if rules in target.rules else ():
                        try:
                            files = exported(file, to, "torchrun")
                        except InputError:
                            continue
                        yield from (Seed(file.name, file.text) for file in files)


def examples(folders: Sequence[Path]) -> Iterator[Seed]:
    """Files below the folders that may be launch files, in order."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".sh", ".yaml", ".yml", ".json", ".toml", ".py") and path.is_file():
                yield Seed(path.name, path.read_text(errors="replace")[:MAX_CHARACTERS])


def launch_subjects(seeds: Sequence[Seed], dice: random.Random) -> Iterator[Subject]:
    """Yield the readers of launch files, of all targets."""
    model = load_model("llama3-8b")
    trainer = (("PER_DEVICE_TRAIN_BATCH_SIZE", "2"), ("GRADIENT_ACCUMULATION_STEPS", "4"), ("BF16", "true"))
    usual = LaunchContext(model=model, num_devices=8, devices_per_node=8, seq_len=4096, variables=trainer)
    odd = (("WORLD_SIZE", "x"), ("TP", "$(id)"), ("BF16", "perhaps"))
    givens = (
        *[usual] * 4,
        replace(usual, model=None),
        LaunchContext(),
        LaunchContext(model=model, num_devices=7, seq_len=1, variables=odd),
    )
    for reader in READERS:
        own = [seed for seed in seeds if reader.recognises(seed.name, seed.text)]
        for seed in own:  # what is imported late is imported before anything is watched
            with suppress(InputError, RecursionError):
                reader.read(seed.text, usual)

        def read(file: Seed, reader: Reader = reader) -> None:
            try:
                reader.recognises(file.name, file.text)
                launch = reader.read(file.text, dice.choice(givens))
            except RecursionError:  # read.launches tells it for all readers
                raise InputError("nested too deeply") from None
            if not isinstance(launch, Launch):
                raise TypeError(f"answered a {type(launch).__name__}")
            launch.plan.describe()

        yield Subject(reader.target, own, read, is_watched=True)


def file_subjects(scratch: Path) -> Iterator[Subject]:
    """Yield what reads the other kinds of files, with what is done next with what they say."""

    def shipped_seeds(folder: str) -> list[Seed]:
        return [Seed(path.name, path.read_text()) for path in shipped(folder).values()]

    def sample(name: str) -> Seed:
        return Seed(name, (DATA / "samples" / name).read_text())

    def subject(name: str, seeds: Sequence[Seed], read: Callable[[Path], object]) -> Subject:
        def read_file(file: Seed) -> None:
            path = scratch / file.name
            path.write_bytes(file.text.encode("utf-8", errors="surrogatepass"))
            try:
                read(path)
            finally:
                path.unlink()

        return Subject(name, seeds, read_file)

    plan, training = PLANS[0], TrainingSpec(seq_len=4096)
    usual = Problem(
        model=load_model("llama3-8b"),
        training=training,
        cluster=load_cluster("h100-sxm:1x8"),
        framework=load_framework("megatron-core"),
    )

    def price(problem: Problem) -> None:
        ranked(problem, estimate(problem, problem.batch([plan])), [0])

    def cluster(path: Path) -> None:
        loaded = load_parts(str(path))
        if isinstance(loaded, ClusterSpec):
            price(replace(usual, cluster=of_size(loaded, loaded.num_devices)))
            quotient(loaded)

    plan_file = make_plan_file(usual, ranked(usual, estimate(usual, PlanBatch.of([plan], 32)), [0]), None)
    devices = [
        Seed(f"{seed.name}", f'name = "box"\ndevices_per_node = 8\n[device]\n{seed.text}')
        for seed in shipped_seeds("devices")
        if "[gemm]" not in seed.text
    ]
    yield subject("cluster", [*shipped_seeds("clusters"), *devices], cluster)
    yield subject("model", shipped_seeds("models"), lambda path: price(replace(usual, model=load_model(str(path)))))
    configs = [Seed("config.json", json.dumps(table)) for table in huggingface_configs()]
    yield subject("config.json", configs, lambda path: price(replace(usual, model=load_model(str(path)))))
    frameworks = [Seed(path.name, path.read_text()) for path in facts()]
    yield subject("framework", frameworks, lambda path: price(replace(usual, framework=load_framework(str(path)))))
    calibrations = shipped_seeds("calibrations")
    yield subject("calibration", calibrations, lambda path: price(replace(usual, calibration=load_calibration(path))))
    plans = [Seed("plan.json", encode(plan_file))]
    yield subject("plan file", plans, lambda path: autoplan.explain(path).to_json())
    sources = [
        Seed(path.name, path.read_text())
        for path in sorted((DATA / "topology").iterdir())
        if path.suffix in (".txt", ".xml")
    ]
    slurm = [
        Seed(
            "topology.conf",
            "SwitchName=s0 Nodes=n[0-15]\nSwitchName=s1 Nodes=n[16-31]\nSwitchName=s2 Switches=s[0-1]\n",
        ),
        Seed("topology.yaml", "- topology: a\n  tree:\n    switches:\n      - switch: s0\n        nodes: n[1-4]\n"),
    ]
    yield subject("node description", [*sources, *slurm], describe_source)
    runs = [sample("runs.csv")]
    yield subject("table of runs", runs, lambda path: predict_runs(path, None))
    yield subject("nccl-tests log", [sample("nccl_tests.txt")], import_timings)
    traces = [Seed(path.name.removesuffix(".sql"), path.read_text()) for path in sorted((DATA / "traces").iterdir())]
    yield subject("trace", traces, lambda path: read_ranks(written_database(path)))
    yield subject("timings of a trace", traces, lambda path: import_timings(written_database(path)))
    databases = [Seed("timings.db", stored_timings(scratch))]
    yield subject("timing database", databases, lambda path: read_store(written_database(path)))
    journals = [Seed("study.log", journal(scratch / "study.log"))]
    yield subject("journal of a study", journals, join_search)
    commands = [Seed("words", "\n".join(line.split())) for line in sample("commands.txt").text.splitlines()]
    workplace = scratch / "files"
    fill_workplace(workplace, databases[0].text)
    yield subject("command line", commands, lambda path: run_command(path, workplace))
    yield subject("sample lengths", list(sample_lengths()), lambda path: load_lengths(str(path)))
    records = [Seed("records.jsonl", "\n".join(exchange_lines(scratch)))]
    yield subject("timing records", records, lambda path: add_records(path, scratch))
    logs = [
        Seed("training.log", "\n".join(line.format(N=at, S=64 * at, M=900 * at) for at in range(1, 9)) + "\n")
        for line in STEP_LINES
    ]
    yield subject("log", [*logs, sample("training.log")], read_training_log)
    jobs = shipped_seeds("jobs")
    yield subject("job template", jobs, lambda path: load_job_template(str(path)))


def huggingface_configs() -> Iterator[dict[str, object]]:
    """Yield config.json files of the model types that are known, with plain sizes."""
    sizes = {
        "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 4096, "head_dim": 128,
        "n_embd": 1024, "n_layer": 4, "n_head": 8, "n_positions": 4096, "num_experts": 8, "num_experts_per_tok": 2,
        "num_local_experts": 8, "moe_intermediate_size": 512, "n_routed_experts": 8, "kv_lora_rank": 128,
        "q_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    }  # fmt: skip
    for kind in model_types():
        yield {"model_type": kind, "architectures": ["SomeForCausalLM"], **sizes}


def facts() -> list[Path]:
    """Return the files of the shipped frameworks."""
    folder = Path(autoplan.__file__).parent / "frameworks"
    return sorted(folder.glob("*/facts/*.toml"))


def describe_source(path: Path) -> None:
    """Read what a node says of itself, and describe it as a cluster."""
    _, found = read_source(path)
    if isinstance(found, ObservedNode):
        described = describe(found)
        cluster_toml(described.cluster, described.remarks)


def sample_lengths() -> Iterator[Seed]:
    """Yield a histogram of lengths, and samples with all that may say how long they are."""
    yield Seed("lengths.csv", "tokens,samples\n1k,56\n64k,1\n")
    samples = (
        {"num_tokens": 812},
        {"input_ids": [1, 2, 3], "label": 1},
        {"prompt": "some words", "completion": "more words", "images": ["a.png"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "words"}, {"type": "image"}]}]},
        {"system": "s", "chosen": "longer words", "rejected": "words"},
    )
    yield Seed("lengths.jsonl", "\n".join(map(json.dumps, samples)) + "\n")


def written_database(path: Path) -> Path:
    """Make a file of statements the database that they describe; some bytes of every third one are damaged."""
    if path.suffix not in (".sqlite", ".db", ".rpd"):
        return path
    text = path.read_text(encoding="utf-8", errors="replace")
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        for statement in text.split(";\n"):
            with suppress(sqlite3.Error, sqlite3.Warning, ValueError):
                database.execute(statement)
        with suppress(sqlite3.Error):
            database.commit()
    dice = random.Random(text)
    if dice.random() < 1 / 3:
        data = bytearray(path.read_bytes())
        for _ in range(dice.choice((1, 5, 50)) if data else 0):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
    return path


def stored_timings(scratch: Path) -> str:
    """Return the statements that make a database with a timing record."""
    path = scratch / "seed.db"
    with open_store(str(path)) as store:
        store.add([timing()])
    with closing(sqlite3.connect(path)) as database:
        return "\n".join(database.iterdump())


def read_store(path: Path) -> None:
    """Read all that a timing database holds."""
    with open_store(str(path)) as store:
        for _ in store.records():
            pass
        store.holdings()


def join_search(path: Path) -> None:
    """Look at two cells of a small space, and keep them in the journal of a study, or go on with one."""
    autoplan.search(
        "llama3-8b", cluster="h100-sxm:1x2", global_batch="4", seq_len=4096, framework="megatron-core",
        fix=["pp=1", "cp=1", "micro_batch=1"], storage=str(path), study="a", trials=2, sampler="random",
    )  # fmt: skip


def journal(path: Path) -> str:
    """Return the journal of a study that has ended."""
    join_search(path)
    text = path.read_text()
    path.unlink()
    return text


def import_timings(path: Path) -> None:
    """Import the timings of a log or a trace, whose collective and device it may not name."""
    operation = "all_reduce" if path.suffix == ".txt" else None
    for _ in read_timings(str(path), device="h100-sxm", operation=operation):
        pass


def read_training_log(path: Path) -> None:
    """Read a log of a run in pieces, as it grows."""
    reader, data = LogReader(Batch(num_sequences=64, seq_len=4096, num_devices=8)), path.read_bytes()
    for first in range(0, len(data), 700):
        reader.feed(data[first : first + 700], first / 1000)
    reader.so_far()
    reader.finish()


def timing() -> Record:
    """Return a timing record."""
    machine = Fingerprint(
        device="h100-sxm", memory_bytes=80 * GIB, devices_per_node=8, runtime="cuda 13.0", torch="2.13.0"
    )
    return Record(
        fingerprint=machine,
        operation="gemm",
        shape=(4096, 4096, 4096),
        dtype="bf16",
        samples_s=(1e-4, 1.1e-4),
        kernel="cublas",
        measured_by="me",
        measured_at="2026-01-01T00:00:00+00:00",
    )


def exchange_lines(scratch: Path) -> list[str]:
    """Return timing records as `db export` writes them."""
    path = scratch / "seed.jsonl"
    write_exchange(path, [timing()])
    try:
        return gzip.decompress(path.read_bytes()).decode().splitlines()
    finally:
        path.unlink()


def add_records(path: Path, scratch: Path) -> None:
    """Add what an unpacked file of records holds to a new database, and read it again."""
    path.write_bytes(gzip.compress(path.read_bytes()))
    database = scratch / "timings.db"
    try:
        with open_store(str(database)) as store:
            store.add(read_exchange(path))
            for _ in store.records():
                pass
            store.holdings()
    finally:
        for left in scratch.glob("timings.db*"):
            left.unlink()


def fill_workplace(folder: Path, timings_sql: str) -> None:
    """Make a folder with a file of each kind that command lines name."""
    logs = folder / "logs" / "first"
    logs.mkdir(parents=True)
    task = "search llama3-8b --cluster h100-sxm:1x8 --global-batch 64 --seq-len 4096"
    for line in (
        f"{task} --out plan.json",
        f"{task} --forbid sp --out other.json",
        "export plan.json --to megatron-lm --out . --force",
    ):
        _run_words(line.split(), folder, io.StringIO())
    copy(folder / "launch.sh", logs)
    for place in (folder, logs):
        copy(DATA / "samples" / "training.log", place)
    copy(DATA / "samples" / "nccl_tests.txt", folder)
    copy(DATA / "topology" / "dgx-a100.txt", folder)
    copy(shipped("calibrations")["nemo-hopper"], folder / "h100.toml")
    copy(shipped("models")["llama3-8b"], folder / "model.toml")
    copy(shipped("clusters")["h100-sxm"], folder / "cluster.toml")
    runs = DATA / "samples" / "runs.csv"
    copy(runs, folder)
    (folder / "predictions.csv").write_text(prediction_table(predict_runs(runs, None)))
    (folder / "lengths.csv").write_text(next(sample_lengths()).text)
    for name in ("timings.db", "copy.db"):
        with closing(sqlite3.connect(folder / name)) as database:
            database.executescript(timings_sql)


def run_command(path: Path, workplace: Path) -> None:
    """Run a command line in a copy of the workplace; its error is the last line that it prints."""
    err, folder = io.StringIO(), path.parent / "below" / "here"
    copytree(workplace, folder)
    try:
        _run_words(path.read_text(errors="replace").split("\n"), folder, err)
    finally:
        rmtree(folder.parent)


def _run_words(words: Sequence[str], folder: Path, err: io.StringIO) -> None:
    with chdir(folder), redirect_stdout(io.StringIO()), redirect_stderr(err):
        arguments, sys.argv = sys.argv, ["autoplan", *words]
        try:
            main()
        except SystemExit as left:
            if left.code:
                raise InputError(f"{err.getvalue().splitlines()[-1:]}") from None
        finally:
            sys.argv = arguments
