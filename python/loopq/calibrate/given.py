"""Prompts that Python holds: token ids, texts, records, dialogues, a tokenizer's batch, or anything that yields them.

Kinds are found by their shape, so that no library of data sets is imported. Each becomes records as of a file.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet, check_count, cut, whole_numbers
from loopq.calibrate.read import Served, encoded
from loopq.errors import CalibrationError

Record = dict[str, Any]
_TAKEN = (
    "loopq takes token ids, texts, records with 'text', 'messages' or 'input_ids', dialogues, a tokenizer's batch, a "
    "Dataset and a DataLoader"
)


def given_tokens(
    given: Iterable[Any], served: Served, seq_len: int, n_prompts: int | None, default: int
) -> TokenSet:
    """Return prompts from Python as token ids. Longer prompts are truncated, as those of files.

    Parameters
    ----------
    given : iterable
        Token ids of each prompt, in lists or an array; ids of one text, which is cut into windows; or as of `records`.
    served : Served
        Conversion of text to token ids.
    seq_len : int
        Tokens of a prompt or window.
    n_prompts : int or None
        Number of prompts from the start.
    default : int
        The same if `n_prompts` is None, for texts, records and iterables. Ids in a list, an array or a batch are all
        taken.

    Raises
    ------
    CalibrationError
        The kind is unknown, or token ids are no whole numbers. The message names the prompt.
    """
    check_count(n_prompts)
    if (whole := one_text(given)) is not None:
        return cut(whole, min(seq_len, whole.size), n_prompts or default, "token ids")
    n = n_prompts if n_prompts is not None or _holds_ids(given) else default
    taken = list(itertools.islice(records(given), n))
    sequences = encoded(((f"prompt {number}", record) for number, record in enumerate(taken)), served)
    source = "token ids" if all("input_ids" in record for record in taken) else "given texts"
    n_cut = sum(ids.size > seq_len for ids in sequences)
    # Files do not say this; an array in Python used to be taken whole.
    source += f", {n_cut} of {len(sequences)} prompts truncated to {seq_len} tokens" if n_cut else ""
    return TokenSet(tuple(ids[:seq_len] for ids in sequences), source, "prompts")


def one_prompt(given: Iterable[Any], served: Served) -> tuple[list[int], bool]:
    """Return the token ids of a single prompt of any kind, and whether it was text.

    Raises
    ------
    CalibrationError
        There are several prompts, or as of `given_tokens`.
    """
    whole = one_text(given)
    if whole is not None:
        return whole.tolist(), False
    first = list(itertools.islice(records(given), 2))
    if len(first) > 1:
        raise CalibrationError("several prompts are given; one is continued at a time")
    if not first:
        return [], False
    (ids,) = encoded([("the prompt", first[0])], served)
    return ids.tolist(), "input_ids" not in first[0]


def one_text(given: Any) -> NDArray[np.int64] | None:
    """Return the token ids of one text, a list or an array of one axis. None for everything else."""
    if isinstance(given, range | array):
        given = list(given)
    if isinstance(given, list | tuple):
        flat = bool(given) and all(_is_number(i) for i in given)
    else:
        flat = _is_array(given) and len(given.shape) == 1 and given.shape[0] > 0 and not _is_text(given)
    return whole_numbers(given, "prompts") if flat else None


def records(given: Any) -> Iterator[Record]:
    """Yield prompts as records, with the keys of a file's.

    Parameters
    ----------
    given : iterable
        Texts; records; dialogues, which are lists of messages with "role" and "content", or a single one; a mapping
        with `input_ids` and maybe `attention_mask`, as a tokenizer returns it; or an iterable of any of these or of
        batches of them, such as a Dataset or a DataLoader.

    Raises
    ------
    CalibrationError
        The kind is unknown, or can be read in several ways.
    """
    if isinstance(given, Mapping) or _is_dialogue(given) or _is_array(given):
        yield from _record(given, "prompts")
        return
    if isinstance(given, tuple) and len(given) > 1 and all(_is_array(i) and len(i.shape) > 1 for i in given):
        yield from _listed(list(given), "prompts")  # refuses
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        raise CalibrationError(f"prompts: got a {type(given).__name__}; give frame.to_dict('records')")
    if isinstance(given, str | bytes) or (
        not isinstance(given, Iterable) and not hasattr(given, "__getitem__")
    ):
        raise CalibrationError(f"prompts: got {type(given).__name__} {given!r:.60}; {_TAKEN}")
    for number, item in enumerate(given):
        yield from _record(item, f"prompts, item {number}")


def _record(item: Any, where: str) -> Iterator[Record]:
    """Yield the records of a prompt or of a batch."""
    if isinstance(item, str):
        yield {"text": item}
    elif isinstance(item, Mapping):
        yield from _rows(item, where)
    elif _is_dialogue(item):
        yield {"messages": list(item)}
    elif _is_array(item) and not _is_text(item):
        axes = len(item.shape)
        ids = whole_numbers(item, where, n_axes=2 if axes == 2 else 1)
        yield from ({"input_ids": row} for row in np.atleast_2d(ids))
    elif _is_sequence(item) or _is_array(item):
        yield from _listed(list(item), where)
    else:
        raise CalibrationError(f"{where}: got {type(item).__name__} {item!r:.60}; {_TAKEN}")


def _listed(items: list[Any], where: str) -> Iterator[Record]:
    if not items or any(_is_number(i) for i in items):
        yield {"input_ids": whole_numbers(items, where)}
    elif len(items) > 1 and all(_is_array(i) for i in items):
        # Ids and a mask, ids and labels, or several prompts: nothing tells which.
        raise CalibrationError(
            f"{where}: a batch of {len(items)} arrays; give a dict with 'input_ids' and 'attention_mask'"
        )
    else:
        for item in items:
            yield from _record(item, where)


def _rows(item: Mapping[str, Any], where: str) -> Iterator[Record]:
    """Yield the rows of a mapping of columns, or a mapping that is one record."""
    columns = {str(key): value for key, value in item.items() if _is_column(str(key), value)}
    if ("input_ids" in item and "input_ids" not in columns) or not columns:
        if not {"input_ids", "text", "messages"} & set(item) and not any(
            isinstance(v, str) for v in item.values()
        ):
            names = ", ".join(map(repr, item)) or "none"
            raise CalibrationError(
                f"{where}: no 'input_ids', 'messages' or text; its keys: {names}; of a set of splits, give one of them"
            )
        yield dict(item)
        return
    n_rows = {len(value) for value in columns.values()}
    masked = item.get("attention_mask") is not None and "input_ids" in columns
    if len(n_rows) > 1 or (masked and "attention_mask" not in columns):
        names = ", ".join(map(repr, {**columns, **({"attention_mask": None} if masked else {})}))
        raise CalibrationError(f"{where}: {names} must have one entry for each prompt")
    for number in range(n_rows.pop()):
        yield {key: value[number] for key, value in columns.items()}


def _is_column(key: str, value: Any) -> bool:
    """Whether the value of a key is one for each prompt of a batch."""
    if key in ("input_ids", "attention_mask"):
        shape = getattr(value, "shape", None)
        nested = isinstance(value, list | tuple) and bool(value) and not _is_number(value[0])
        return nested if shape is None else len(shape) == 2
    if not isinstance(value, list | tuple) or not value:
        return False
    return isinstance(value[0], list) if key == "messages" else isinstance(value[0], str)


def _holds_ids(given: Any) -> bool:
    """Whether all prompts are ids that are held already, so that all are taken."""
    if isinstance(given, Mapping):
        return "input_ids" in given
    if isinstance(given, list | tuple):
        return all(_is_array(i) or (_is_sequence(i) and not _is_dialogue(i)) for i in given)
    return _is_array(given)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence | array) and not isinstance(value, str | bytes | bytearray)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and len(value.shape) > 0


def _is_text(value: Any) -> bool:
    """Whether an array holds texts."""
    return str(value.dtype).startswith(("<U", "object", "str", "string"))


def _is_number(value: Any) -> bool:
    return not isinstance(value, str) and (
        isinstance(value, int | float | complex | np.generic) or getattr(value, "shape", None) == ()
    )


def _is_dialogue(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(message, Mapping) and {"role", "content"} <= set(message) for message in value)
    )
