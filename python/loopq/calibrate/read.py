"""Prompts from files, in the form that engines serve: with the tokenizer's special tokens or its chat template."""

from __future__ import annotations

import codecs
import dataclasses
import io
import itertools
import lzma
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import Encode, TokenSet, check_count, cut, from_ids, whole_numbers, windows
from loopq.calibrate.template import applied
from loopq.errors import CalibrationError, CheckpointError, ConfigError, LoopqError, model_code, require
from loopq.storage.files import MAX_SIZE, check_regular
from loopq.storage.schema import parse_json
from loopq.terminal.text import visible

#: Maximum bytes of a text.
MAX_TEXT = 2**30
#: Bytes of a text or characters of a record that are encoded first, and tokens at the end of what was cut that are not
#: used. A tokenizer can take a thousand times the memory of its text.
_LONG, _LAST = 2**16, 256
_ROLES = ("user", "assistant")
_NO_IDS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Served:
    """Conversion of text to token ids.

    Parameters
    ----------
    encode : callable
        Function from text to token ids. It adds no special tokens.
    first, last : tuple of int
        Special tokens that the tokenizer puts before and after a text.
    tokenizer : object or None
        Tokenizer with the chat template. It may be None.
    field : str
        Text fields of a record, joined by commas. If empty, it is "text", or else all text fields.
    template : bool
        Whether the chat template is applied to every record. Fields are then turns of user and assistant. Messages take
        it anyway.
    n_tokens : int or None
        Tokens that are used of each record. None uses all.
    """

    encode: Encode
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    tokenizer: Any = None
    field: str = ""
    template: bool = False
    n_tokens: int | None = None

    @classmethod
    def of(cls, encode: Encode, tokenizer: Any, field: str = "", template: bool = False) -> Served:
        """Find a tokenizer's special tokens. Without a tokenizer, or with a plain function, there are none.

        Raises
        ------
        ConfigError
            A template is requested, but the tokenizer has none.
        CheckpointError
            The tokenizer raises an error.
        """
        if template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "template: the model's tokenizer has no chat template; leave --set template=true out"
            )
        if not hasattr(tokenizer, "all_special_ids") or not callable(tokenizer):
            return cls(encode, tokenizer=tokenizer, field=field)
        with model_code("a text of one letter", CheckpointError, "the tokenizer"):
            whole, plain = list(tokenizer("a").input_ids), list(encode("a"))
        places = range(len(whole) - len(plain) + 1)
        at = next((i for i in places if plain and whole[i : i + len(plain)] == plain), 0)
        return cls(encode, tuple(whole[:at]), tuple(whole[at + len(plain) :]), tokenizer, field, template)

    def ids(self, record: Mapping[str, Any], place: str) -> NDArray[np.int64]:
        """Return the token ids of one record: its `input_ids`, its messages or its text.

        Raises
        ------
        CalibrationError
            The record lacks all of them, or a value has another kind.
        """
        if "input_ids" in record and not self.field:
            return _without_padding(record, place)
        text = "\n".join(self._texts(record, place))
        return np.asarray([*self.first, *self.start(text), *self.last], dtype=np.int64)

    def start(self, text: str) -> Sequence[int]:
        """Return the token ids of a text. Of a long one, only as much is encoded as a prompt needs."""
        n = len(text) if self.n_tokens is None else max(_LONG, 16 * self.n_tokens)
        while n < len(text):
            ids = self.encode(text[:n])
            # The last tokens depend on the text behind them.
            if len(ids) - _LAST >= (self.n_tokens or 0):
                return ids[:-_LAST]
            n *= 4
        return self.encode(text)

    def is_dialogue(self, record: Mapping[str, Any]) -> bool:
        """Whether a record takes the chat template. Messages do, unless the record has a text or ids as well."""
        if self.field or "input_ids" in record:
            return self.template and bool(self.field)
        return self.template or ("text" not in record and isinstance(record.get("messages"), list))

    def dialogue(self, record: Mapping[str, Any], place: str) -> list[Any]:
        """Return the messages of a record, or its fields as turns."""
        messages = record.get("messages")
        if self.field or not isinstance(messages, list):
            texts = zip(itertools.cycle(_ROLES), self._texts(record, place), strict=False)
            messages = [{"role": role, "content": text} for role, text in texts]
        return messages

    def _texts(self, record: Mapping[str, Any], place: str) -> list[str]:
        names = [n.strip() for n in self.field.split(",")] if self.field else self._default(record)
        for name in names or ["text"]:
            if name not in record:
                there = ", ".join(map(repr, record)) or "none"
                raise CalibrationError(f"{place}: no field {name!r} and no 'input_ids'; its fields: {there}")
            if not isinstance(record[name], str):
                raise CalibrationError(f"{place}: field {name!r} must be text; got {record[name]!r:.80}")
        return [record[name] for name in names]

    @staticmethod
    def _default(record: Mapping[str, Any]) -> list[str]:
        return ["text"] if "text" in record else [n for n, v in record.items() if isinstance(v, str)]


def _without_padding(record: Mapping[str, Any], place: str) -> NDArray[np.int64]:
    """Return the `input_ids` of a record where its `attention_mask` is 1."""
    ids = whole_numbers(record["input_ids"], f"{place}: 'input_ids'")
    mask = record.get("attention_mask")
    if mask is None:
        return ids
    kept = np.asarray(mask.detach().cpu() if hasattr(mask, "detach") else mask)
    if kept.shape != ids.shape or not np.isin(kept, (0, 1)).all():
        raise CalibrationError(
            f"{place}: 'attention_mask' must have a 0 or a 1 for each of the {ids.size} ids; got {kept.dtype} "
            f"{kept.shape}"
        )
    places = np.flatnonzero(kept)
    if places.size and places[-1] - places[0] >= places.size:
        raise CalibrationError(
            f"{place}: 'attention_mask' has a 0 between ones; only padding before or after a prompt can be left out"
        )
    return ids[places]


def read_tokens(path: Path, served: Served, seq_len: int, n_prompts: int | None) -> TokenSet:
    """Read a calibration or evaluation set by the kind of file.

    Parameters
    ----------
    path : Path
        A ``.jsonl`` or ``.parquet`` file with one prompt per record, or a ``.npy`` file with integers (n_prompts,
        n_tokens). Any other file is text and is cut into windows. A folder holds texts (``*.txt``), which count as one
        text, or files of records.
    served : Served
        Conversion of text to token ids.
    seq_len : int
        Tokens of a window. Longer prompts are truncated.
    n_prompts : int or None
        Number of prompts from the start.

    Returns
    -------
    TokenSet
        The prompts.

    Raises
    ------
    CalibrationError
        The file does not match its extension, or holds no prompt. The message names file and line.
    ConfigError
        A template is requested, but the file is text to be cut.
    """
    check_count(n_prompts)
    parts = _parts(path)
    if parts[0].suffix in _RECORDS:
        served = dataclasses.replace(served, n_tokens=seq_len)
        records = itertools.islice(_records(parts), n_prompts)
        return TokenSet(tuple(ids[:seq_len] for ids in encoded(records, served)), _label(path), "prompts")
    if path.suffix == ".npy":
        return from_ids(_ids_of(path)[:n_prompts, :seq_len], _label(path))
    _refuse_fields(path, served)
    return _from_text(parts, served, seq_len, n_prompts, _label(path))


def _label(path: Path) -> str:
    """Return the file's name for checkpoints, which hold visible UTF-8 only."""
    return visible(os.fsencode(path.name).decode("utf-8", "backslashreplace"), one_line=True)


def encoded(records: Iterable[tuple[str, Any]], served: Served) -> list[NDArray[np.int64]]:
    """Return the token ids of records, each with its place for messages. Dialogues take the chat template together.

    Raises
    ------
    CalibrationError
        As of `Served.ids`, or a record has messages and the tokenizer has no chat template.
    """
    prompts: list[NDArray[np.int64]] = []
    dialogues: dict[str, list[Any]] = {}
    at: list[int] = []
    for place, record in records:
        fields = _fields(record, place)
        if served.is_dialogue(fields):
            if not getattr(served.tokenizer, "chat_template", None):
                raise CalibrationError(
                    f"{place}: has messages, and the model's tokenizer has no chat template; name fields with text "
                    "(--set field=NAME), or give texts"
                )
            at.append(len(prompts))
            dialogues[place] = served.dialogue(fields, place)
        prompts.append(_NO_IDS if served.is_dialogue(fields) else served.ids(fields, place))
    texts = applied(served.tokenizer, dialogues) if dialogues else {}
    for number, text in zip(at, texts.values(), strict=True):
        prompts[number] = np.asarray(served.start(text), dtype=np.int64)
    return prompts


def check_source(path: Path, field: str, template: bool) -> None:
    """Refuse what `read_tokens` refuses without a tokenizer: a missing, unreadable or empty file, or its first record.

    Raises
    ------
    CalibrationError, ConfigError
        As `read_tokens`.
    """
    parts, served = _parts(path), Served(lambda text: (), field=field, template=template)
    if parts[0].suffix in _RECORDS:
        for place, record in _records(parts):
            if not served.is_dialogue(_fields(record, place)):
                served.ids(record, place)
            return
        raise CalibrationError(f"{path}: no token sequences; give a file with records")
    if path.suffix == ".npy":
        _ids_of(path)
        return
    _refuse_fields(path, served)
    size = _size(parts)
    if not _read_text(parts, _LONG).strip() and not _read_text(parts, size).strip():
        raise CalibrationError(f"{path}: the text is empty; give more text")


#: Suffixes of files of records, and of those that a folder may hold.
_RECORDS = (".jsonl", ".parquet")
_IN_FOLDERS = (".txt", *_RECORDS)


def _parts(path: Path) -> list[Path]:
    """Return the file, or the files of a folder in name order: texts, or records."""
    if not path.is_dir():
        check_regular(path, CalibrationError)
        return [path]
    parts = sorted(part for part in path.iterdir() if part.suffix in _IN_FOLDERS)
    if not parts:
        raise CalibrationError(f"{path}: the folder has no *.txt, *.jsonl or *.parquet; name a file instead")
    if len({part.suffix in _RECORDS for part in parts}) > 1:
        raise CalibrationError(f"{path}: the folder has texts and records; name a folder with one of them")
    for part in parts:
        check_regular(part, CalibrationError)
    return parts


def _records(parts: list[Path]) -> Iterator[tuple[str, Any]]:
    for part in parts:
        yield from json_lines(part, CalibrationError) if part.suffix == ".jsonl" else _parquet_rows(part)


def _fields(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise CalibrationError(f"{place}: no field 'text' and no 'input_ids': {record!r:.80}")
    return record


def _ids_of(path: Path) -> NDArray[Any]:
    ids = _mapped(path)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise CalibrationError(
            f"{path}: token ids are integers (n_prompts, n_tokens); got {ids.dtype} {ids.shape}"
        )
    return ids


def _refuse_fields(path: Path, served: Served) -> None:
    if served.template or served.field:
        raise ConfigError(f"{path}: template and field are for records: give a .jsonl or .parquet file")


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    check_regular(path, CalibrationError)
    parquet, errors = require("pyarrow.parquet"), require("pyarrow.lib").ArrowException
    try:
        file = parquet.ParquetFile(path)
        groups = (file.iter_batches(1, [_row_group(path, file, n)]) for n in range(file.num_row_groups))
        # A row has any length, so one is held at a time.
        rows = itertools.chain.from_iterable(batch.to_pylist() for group in groups for batch in group)
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
    except (errors, OSError, ValueError) as cause:
        reason = " ".join(str(cause).split())
        raise CalibrationError(f"{path}: cannot be read as parquet ({reason:.200})") from cause


def _row_group(path: Path, file: Any, number: int) -> int:
    """Return the number of a row group after a check of its size, since pyarrow unpacks a record whole."""
    group = file.metadata.row_group(number)
    # Not of its columns: where their metadata is damaged, pyarrow ends the process.
    size = group.total_byte_size
    if size > MAX_SIZE * max(1, group.num_rows):
        raise CalibrationError(
            f"{path}, row group {number}: unpacks to {size} bytes in {group.num_rows} rows; a record has at most "
            f"{MAX_SIZE} bytes"
        )
    return number


def json_lines(path: Path, error: type[LoopqError]) -> Iterator[tuple[str, Any]]:
    """Yield the place (for messages) and the value of every non-blank line of a JSON-lines file.

    Parameters
    ----------
    path : Path
        The file. A file with the suffix ``.xz`` is unpacked while reading.
    error : type of LoopqError
        Error to raise, with file and line. The file is missing or cannot be read or unpacked, or a line is not JSON in
        UTF-8 or exceeds 256 MiB.
    """
    check_regular(path, error)
    number = 0
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_SIZE + 1), b""), start=1):
                place = f"{path}, line {number}"
                if len(line) > MAX_SIZE:
                    raise error(f"{place}: longer than {MAX_SIZE} bytes")
                if line.strip():
                    yield place, parse_json(line, place, error, finite=False)
    except (OSError, EOFError, lzma.LZMAError) as cause:
        raise error(f"{path}, line {number + 1}: cannot be read ({cause}); copy the file again") from cause


def _size(parts: list[Path]) -> int:
    """Return the bytes of texts. They are looked at first, because a sparse file can have any size."""
    size = sum(check_regular(part, CalibrationError) for part in parts)
    if size > MAX_TEXT:
        raise CalibrationError(
            f"{parts[0]}: {size} bytes of text; allowed: {MAX_TEXT}. Prompts come from the start: give its first part"
        )
    return size


def _from_text(parts: list[Path], served: Served, seq_len: int, n_prompts: int | None, name: str) -> TokenSet:
    """Cut windows from texts. Of a large one, only as much is read as the prompts need."""
    size = _size(parts)
    n = size if n_prompts is None else max(_LONG, 16 * seq_len * n_prompts)
    while n < size:
        ids = np.asarray(served.encode(_read_text(parts, n)), dtype=np.int64)
        # The last tokens depend on the text behind them.
        if ids.size - _LAST >= seq_len * (n_prompts or 0):
            return cut(ids[:-_LAST], seq_len, n_prompts, name, served.first)
        n *= 4
    return windows(_read_text(parts, size), served.encode, seq_len, n_prompts, name, served.first)


def _read_text(parts: list[Path], n_bytes: int) -> str:
    """Read the start of UTF-8 text files as one text."""
    part, texts = parts[0], []
    try:
        for part in parts:
            with part.open("rb") as file:
                data = file.read(n_bytes + 1)
            # A character may be cut, and line ends become those of Python.
            decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
            texts.append(decoder.decode(data[:n_bytes], len(data) <= n_bytes))
            n_bytes -= len(data)
            if n_bytes <= 0:
                break
    except OSError as cause:
        raise CalibrationError(f"{part}: cannot be read ({cause.strerror})") from cause
    except UnicodeDecodeError as cause:
        raise CalibrationError(f"{part}: not UTF-8 text (byte {cause.start})") from cause
    return "\n".join(texts)


def _mapped(path: Path) -> NDArray[Any]:
    """Map an array file into memory. A header that exceeds the file is refused before any allocation."""
    check_regular(path, CalibrationError)
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as cause:  # numpy's reader of headers raises far more kinds than it documents
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        raise CalibrationError(f"{path}: cannot be read as an array ({reason:.200})") from cause
