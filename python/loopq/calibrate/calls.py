"""Batches for modules that take no token ids: each is the arguments of one call."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.errors import CalibrationError, ConfigError
from loopq.systems.base import Batch, Call
from loopq.systems.capabilities import TakesCalls

if TYPE_CHECKING:
    from loopq.models.load import LoadedModel

Score = Callable[[Any, Any], float]
#: Keys of a record with text or token ids.
_TEXT = {"input_ids", "text", "messages"}
_KINDS = "a batch is a tuple (arguments), a dict (keyword arguments) or one float tensor"


@dataclass(frozen=True)
class CallSet(TokenSet):
    """Calls of a module in the place of token sequences.

    The sequence of a call is its digest, repeated to as many numbers as a looped layer reads rows. So sizes, resume
    keys and shared prompts are found as for tokens.

    Parameters
    ----------
    calls : tuple of Call
        One call for each sequence.
    score : callable, optional
        Takes what the module returns for a batch, and the batch as it was given. Returns a number. An evaluation calls
        it.
    """

    unit: ClassVar[str] = "batches"
    calls: tuple[Call, ...] = ()
    score: Score | None = None

    @classmethod
    def of(cls, loaded: LoadedModel, calls: Sequence[Call]) -> CallSet:
        """Build a set. The model runs the first call to see its rows.

        Raises
        ------
        CalibrationError
            The model takes token ids.
        """
        system = loaded.system
        if not isinstance(system, TakesCalls) or loaded.tokenizer is not None:
            raise CalibrationError(
                f"batch 0: {type(loaded.model).__name__} takes token ids, which are whole numbers; batches of other "
                "arrays are for modules without tokenizer whose class no adapter knows"
            )
        digests = [_digest(call) for call in calls]
        sizes = [_n_numbers(call) for call in calls]
        alone = cls((digests[0],), "arguments", "prompts", calls=(calls[0],))
        per_number = system.n_rows(alone.first()) / sizes[0]
        rows = [max(1, round(per_number * size)) for size in sizes]
        sequences = tuple(np.resize(digest, n) for digest, n in zip(digests, rows, strict=True))
        return dataclasses.replace(alone, sequences=sequences, calls=tuple(calls))

    def take(self, first: int, last: int | None = None) -> CallSet:
        """Return the calls from `first` to `last`."""
        kept = self.sequences[first:last]
        return dataclasses.replace(self, sequences=kept, calls=self.calls[first:last], n_asked=None)

    def plan(self, batch_size: int) -> list[list[int]]:
        """Return the number of each call. Calls are never joined."""
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1; got {batch_size}")
        return [[number] for number in range(len(self.calls))]

    def _batch(self, numbers: Sequence[int], seed: int) -> Batch:
        return dataclasses.replace(super()._batch(numbers, seed), call=self.calls[numbers[0]])


def given_calls(given: Any, most: int) -> tuple[list[Call] | None, Any]:
    """Return the calls among prompts from Python, if they are calls, and the prompts.

    They are calls if the first item is a float tensor, or a tuple, list or dict that holds one. Token ids are whole
    numbers, so nothing is both. The prompts of an iterable can be read again from the second result.

    Parameters
    ----------
    given : object
        Prompts as of `loopq.calibrate.prompts.Prompts`.
    most : int
        Calls at most from an iterable of unknown length. A list is taken whole.

    Raises
    ------
    CalibrationError
        One batch is given in the place of several, or a batch holds something else than arrays, numbers and strings.
    """
    if isinstance(given, str | bytes) or _is_array(given) or hasattr(given, "columns"):
        return None, given
    if isinstance(given, tuple | Mapping) and _is_call(given):
        if isinstance(given, tuple) and not any(map(_is_float, given)):
            return [_call(item, number) for number, item in enumerate(given)], given
        raise CalibrationError(f"batches: this is one batch; give a list of batches. {_KINDS}")
    if isinstance(given, Mapping) or not (isinstance(given, Iterable) or hasattr(given, "__getitem__")):
        return None, given
    items: Iterable[Any] = given
    if not isinstance(given, Sequence):
        read = iter(given)
        start = list(itertools.islice(read, 1))
        items, given = itertools.chain(start, itertools.islice(read, most - 1)), itertools.chain(start, read)
    else:
        start = list(given[:1])
    if not start or not _is_call(start[0]):
        return None, given
    return [_call(item, number) for number, item in enumerate(items)], given


def _is_call(item: Any) -> bool:
    if isinstance(item, Mapping):
        return not _TEXT & {*item} and any(map(_is_call, item.values()))
    return _is_float(item) or (isinstance(item, tuple | list) and any(map(_is_call, item)))


def _call(item: Any, number: int) -> Call:
    where = f"batch {number}"
    if isinstance(item, Mapping):
        return Call((), {str(name): _held(v, f"{where}, {name!r}") for name, v in item.items()}, item)
    if isinstance(item, tuple | list):
        return Call(tuple(_held(v, f"{where}, argument {i}") for i, v in enumerate(item)), {}, item)
    if not _is_array(item):
        raise CalibrationError(f"{where}: got {type(item).__name__} {item!r:.60}; {_KINDS}")
    return Call((_held(item, where),), {}, item)


def _held(value: Any, where: str) -> Any:
    """Return a value with tensors in the place of arrays."""
    import torch  # lazy: loopq imports without torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {name: _held(v, where) for name, v in value.items()}
    if isinstance(value, tuple | list):
        held = [_held(v, where) for v in value]
        return type(value)(*held) if hasattr(value, "_fields") else type(value)(held)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CalibrationError(
        f"{where}: got {type(value).__name__}; a batch holds tensors, arrays, numbers, strings, and lists and dicts of "
        "these: let a module of your own make anything else of them"
    )


def _leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Values of a call, each with its place."""
    if not isinstance(value, tuple | list | Mapping):
        yield "", value
        return
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
    yield "/", len(value)
    for name, part in items:
        for place, leaf in _leaves(part):
            yield f"/{name!r}{place}", leaf


def is_finite(call: Call) -> bool:
    """Whether no array of a call holds NaN or infinity. A module may take NaN for missing values."""
    arrays = (leaf for _, leaf in _leaves((call.args, call.kwargs)) if hasattr(leaf, "isfinite"))
    return all(bool(leaf.isfinite().all()) for leaf in arrays)


def _digest(call: Call) -> Any:
    """SHA-256 of a call as four whole numbers."""
    import torch  # lazy: loopq imports without torch

    total = hashlib.sha256()
    for place, leaf in _leaves((call.args, call.kwargs)):
        if isinstance(leaf, torch.Tensor):
            total.update(f"{place} {leaf.dtype} {list(leaf.shape)}".encode())
            total.update(leaf.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            total.update(f"{place} {leaf!r}".encode())
    return np.frombuffer(total.digest(), "<i8").astype(np.int64)


def _n_numbers(call: Call) -> int:
    return sum(leaf.numel() for _, leaf in _leaves((call.args, call.kwargs)) if hasattr(leaf, "numel")) or 1


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and len(value.shape) > 0


def _is_float(value: Any) -> bool:
    return _is_array(value) and "float" in str(value.dtype)
