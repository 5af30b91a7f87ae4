"""Lengths of samples: a histogram as text or CSV, or counted from the samples of a JSONL file; numbers of images."""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import is_file, read_text
from autoplan.base.values import parse_count
from autoplan.spec.lengths import ImageCounts, Lengths

MAX_BINS = 256  # distinct lengths; more are merged, weighted by samples
# Bytes per token of text samples: 4.3 to 4.7 for English with a vocabulary of 128k, fewer for code and other languages.
BYTES_PER_TOKEN = 4
ROUNDING = 1e-9  # relative to a bin
_COUNTS = ("num_tokens", "length", "tokens", "n_tokens", "token_count")  # a sample's keys, the most reliable first
_IDS = ("input_ids", "token_ids", "tokens")
# Keys of a message with its text; a template adds its role.
_TEXTS = ("content", "value", "text")
TOKENS_PER_MESSAGE = 4
_CONVERSATIONS = ("messages", "conversations")
_ANSWERS = ("chosen", "rejected")
_BESIDE_CONVERSATIONS = ("system", "tools", *_ANSWERS)
_PAIRS = re.compile(r"\s*[0-9][0-9kKmM]*(:[0-9]+[kKmM]?)?(\s*,\s*[0-9][0-9kKmM]*(:[0-9]+[kKmM]?)?)*\s*")
_NO_TEXT = ("id", "role", "from", "source", "category", "label", "score", "meta", "metadata", "image", "images")


def load_lengths(text: str, image_tokens: int = 0) -> Lengths:
    """Return the lengths described by a text: TOKENS:SAMPLES,... such as "1k:56,64k:1", or the path of a file.

    A .jsonl file has one sample per line, whose tokens are the number under num_tokens or length, the size of
    input_ids, or an estimate from the bytes of its texts (prompts, completions, messages) with the `image_tokens` of
    its images.  Any other file is a histogram, with tokens and samples in each line.
    """
    path = Path(text)
    if _PAIRS.fullmatch(text):
        return Lengths(histogram=tuple(_typed(part, "--lengths") for part in text.split(",")), source=text.strip())
    if not is_file(path):
        raise InputError(
            f"--lengths {text[:60]!r}: write TOKENS:SAMPLES,... such as 1k:56,64k:1, "
            "or the path of a histogram or a JSONL of samples"
        )
    if path.suffix in (".jsonl", ".ndjson"):
        return _of_samples(path, image_tokens)
    if path.suffix == ".json":
        raise InputError(f"--lengths {path}: a JSON file is not read: write a sample in each line of a .jsonl")
    return _binned(_of_histogram(path), path.name)


def load_images(text: str) -> ImageCounts:
    """Return the numbers of images described by a text: IMAGES:SAMPLES,... such as "1:3,8:1", or one number."""
    if not _PAIRS.fullmatch(text):
        raise InputError(f"--images {text[:60]!r}: write a number, or IMAGES:SAMPLES,... such as 1:3,8:1")
    return ImageCounts(histogram=tuple(_typed(part, "--images") for part in text.split(",")), source=text.strip())


def _typed(part: str, flag: str) -> tuple[int, int]:
    number, sign, samples = part.strip().partition(":")
    return parse_count(number, flag), parse_count(samples, flag) if sign else 1


def _of_histogram(path: Path) -> Counter[int]:
    """Return the samples of each length in a two-column table, with or without a header line."""
    counts: Counter[int] = Counter()
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").splitlines(), 1):
        cells = re.split(r"[,;:\s]+", line.strip())
        if cells == [""] or (number == 1 and not any(cell[:1].isdigit() for cell in cells)):
            continue
        if len(cells) != 2 or not all(re.fullmatch(r"[0-9]{1,15}[kKmM]?", cell) for cell in cells):
            raise InputError(f"{path}: line {number}: write the tokens of a sample and the number of such samples")
        tokens, samples = (parse_count(cell, str(path)) for cell in cells)
        counts[tokens] += samples
    return counts


def _of_samples(path: Path, image_tokens: int) -> Lengths:
    """Return the lengths of the samples in a JSONL file of any size."""
    import msgspec

    decoder = msgspec.json.Decoder()
    counts: Counter[int] = Counter()
    is_estimated = False
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                for sequence in _sequences_of(decoder.decode(line.removeprefix(BOM_UTF8))):
                    tokens, by_text = _tokens_of(sequence, f"{path}: line {number}")
                    is_estimated |= by_text
                    counts[tokens + image_tokens * by_text] += 1
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{path}: line {number}: not valid JSON: {error}") from None
    images = f" beside {image_tokens:,} of images" * bool(image_tokens)
    return _binned(counts, f"{path.name}, {BYTES_PER_TOKEN} bytes a token{images}" if is_estimated else path.name)


def _sequences_of(sample: Any) -> Iterator[Any]:
    """Yield the sequences of a sample: for a preference both answers, each with the prompt."""
    if not (isinstance(sample, dict) and "chosen" in sample and "rejected" in sample):
        yield sample
        return
    prompt = {key: value for key, value in sample.items() if key not in _ANSWERS}
    for answer in _ANSWERS:
        yield (prompt if _is_answer_alone(sample[answer]) else {}) | {answer: sample[answer]}


def _is_answer_alone(value: Any) -> bool:
    """Return whether the answer of a preference lacks the prompt: it is no conversation that a user begins."""
    first = value[0] if isinstance(value, list) and value else None
    return not isinstance(first, dict) or first.get("role", first.get("from")) in (None, "assistant", "gpt")


def _tokens_of(sample: Any, where: str) -> tuple[int, bool]:
    """Return (tokens of a sample, whether they were estimated from its text for lack of a count)."""
    counted = {key: sample[key] for key in _COUNTS if key in sample} if isinstance(sample, dict) else {"": sample}
    for key, count in counted.items():
        if isinstance(count, int | float) and not isinstance(count, bool):
            if count < 0 or count % 1 != 0:
                raise InputError(f"{where}: {key or 'tokens'} {count}: write a whole number of tokens")
            return max(int(count), 1), False
    if isinstance(sample, dict):
        for key in _IDS:
            if isinstance(sample.get(key), list):
                return max(len(sample[key]), 1), False
        # In addition to a conversation, keys such as the prompt only repeat its text.
        conversation = next((key for key in _CONVERSATIONS if sample.get(key)), None)
        beside = (conversation, *_BESIDE_CONVERSATIONS)
        texts = list(_texts({key: sample[key] for key in beside if key in sample} if conversation else sample))
        if texts:
            num_bytes = sum(len(text.encode()) for text in texts)
            return max(math.ceil(num_bytes / BYTES_PER_TOKEN) + TOKENS_PER_MESSAGE * len(texts), 1), True
    raise InputError(f"{where}: has neither num_tokens, length, input_ids nor text: add the number of its tokens")


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a sample: those of its messages, or under any key that is not known to be something else."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        keys = [key for key in _TEXTS if key in value] if "role" in value or "from" in value else list(value)
        for key in keys:
            if key not in _NO_TEXT:
                yield from _texts(value[key])


def _binned(counts: Counter[int], source: str) -> Lengths:
    """Return at most `MAX_BINS` lengths: more are merged to the means of bins of equal width in their logarithm."""
    counts = Counter({max(tokens, 1): samples for tokens, samples in counts.items() if samples})
    if not counts:
        raise InputError(f"--lengths {source}: holds no samples: write a line for each, or their histogram")
    if len(counts) <= MAX_BINS:
        return Lengths(histogram=tuple(counts.items()), source=source)
    shortest = math.log(min(counts))
    width = (math.log(max(counts)) - shortest) / (MAX_BINS - 1)
    bins: dict[int, list[int]] = {}
    for tokens, samples in counts.items():
        # The longest samples, which determine the memory of a step, have a bin of their own.
        entry = bins.setdefault(int((math.log(tokens) - shortest) / width + ROUNDING), [0, 0])
        entry[0] += tokens * samples
        entry[1] += samples
    means = [(round(tokens / samples), samples) for tokens, samples in bins.values()]
    return Lengths(histogram=tuple(means), source=source)
