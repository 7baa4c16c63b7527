"""Token sequences for calibration and evaluation, with their packing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.overlap import Overlap, hashes_of, overlap
from loopq.errors import CalibrationError, ConfigError
from loopq.systems.base import Batch

if TYPE_CHECKING:
    from torch import Tensor

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class TokenSet:
    """Token sequences and their origin.

    Parameters
    ----------
    sequences : tuple of ndarray, int64, 1-D
        One sequence per prompt. No sequence is empty.
    source : str
        Name of the tokens for the report.
    packing : str
        Way of packing. "windows" cuts the text into windows of equal length and drops the rest. "prompts" has one
        sequence for each record. "chunks" cuts the text as llama.cpp's llama-perplexity does. There a position is
        scored only if its next token is in the chunk too.
    scored_from : int
        First scored position of every sequence, for comparisons and gradients. Earlier positions hold a task's
        question.
    random_tokens : float
        Share of randomly drawn tokens.
    n_first : int
        Special tokens at the start of every window. Random tokens do not replace them.
    unchanged : tuple of ndarray
        The sequences before random tokens replaced some of theirs. Empty if they are the same.
    n_asked : int, optional
        Number of prompts that were asked for. The source may hold fewer.
    """

    #: Name of the sequences in messages.
    unit: ClassVar[str] = "prompts"
    sequences: tuple[NDArray[np.int64], ...]
    source: str
    packing: str
    scored_from: int = 0
    random_tokens: float = 0.0
    n_first: int = 0
    unchanged: tuple[NDArray[np.int64], ...] = ()
    n_asked: int | None = None

    def __post_init__(self) -> None:
        if not self.sequences:
            raise CalibrationError(
                f"{self.source}: no token sequences; give more text or a shorter --seq-len"
            )
        for number, sequence in enumerate(self.sequences):
            if sequence.ndim != 1 or sequence.size == 0:
                raise CalibrationError(f"{self.source}: prompt {number} is empty; remove it")
            if sequence.size <= self.scored_from:
                raise CalibrationError(
                    f"{self.source}: prompt {number} has {sequence.size} tokens, none of them scored: the question "
                    f"alone has {self.scored_from}"
                )

    @property
    def n_tokens(self) -> int:
        """Total number of tokens."""
        return sum(s.size for s in self.sequences)

    @property
    def shortage(self) -> str:
        """The message if the source holds too few prompts; empty otherwise."""
        if self.n_asked is None or len(self.sequences) >= self.n_asked:
            return ""
        return f"{self.n_asked} {self.unit} were asked for, and {self.source} holds {len(self.sequences)}"

    @property
    def size(self) -> str:
        """Number of prompts and rows, for messages."""
        rows = "tokens" if self.unit == "prompts" else "rows"
        return f"{len(self.sequences)} {self.unit}, {self.n_tokens:,} {rows}"

    def digest(self) -> str:
        """SHA-256 over lengths and ids. Sets with the same digest have the same tokens and scored positions."""
        total = hashlib.sha256()
        if self.scored_from:
            total.update(b"scored from %d" % self.scored_from)
        for sequence in self.sequences:
            total.update(np.int64(sequence.size).tobytes())
            total.update(np.ascontiguousarray(sequence, dtype="<i8").tobytes())
        return total.hexdigest()

    def take(self, first: int, last: int | None = None) -> TokenSet:
        """Return the prompts from `first` to `last`."""
        kept, unchanged = self.sequences[first:last], self.unchanged[first:last]
        return dataclasses.replace(self, sequences=kept, unchanged=unchanged, n_asked=None)

    def scored(self, outputs: Tensor, output: str) -> Tensor:
        """Return the scored logits, shape (n_prompts, n_scored, vocabulary). Hidden states are returned whole."""
        return outputs[:, self.scored_from :] if output == "logits" else outputs

    def with_random_tokens(self, share: float, known: NDArray[np.int64]) -> TokenSet:
        """Replace tokens at random places by random tokens. Every call gives the same result.

        Parameters
        ----------
        share : float
            Share of the tokens, on average.
        known : ndarray, int64, 1-D
            Token ids to draw from. All are equally likely.

        Raises
        ------
        ConfigError
            The set holds prompts instead of a cut text. The marks of a dialogue or task must stay in place.
        """
        if self.packing != "windows":
            raise ConfigError(f"random_tokens is for text that is cut in windows; {self.source} has prompts")
        rng = np.random.default_rng(0)
        changed = []
        for ids in self.sequences:
            drawn = known[rng.integers(0, known.size, ids.size)]
            chosen = rng.random(ids.size) < share
            chosen[: self.n_first] = False
            changed.append(np.where(chosen, drawn, ids))
        source = f"{self.source}, {100 * share:.3g} % of its tokens random"
        return dataclasses.replace(
            self, sequences=tuple(changed), source=source, random_tokens=share, unchanged=self.sequences
        )

    def describe(self) -> dict[str, Any]:
        """Return plain data for the report."""
        facts = {
            "source": self.source,
            "packing": self.packing,
            "n_prompts": len(self.sequences),
            "n_tokens": self.n_tokens,
            "sha256": self.digest(),
            "prompt_hashes": hashes_of(
                self._plain(self.unchanged or self.sequences), cut=self.packing != "prompts"
            ),
        }
        return facts | ({"random_tokens": self.random_tokens} if self.random_tokens else {})

    def _plain(self, sequences: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        return [ids[self.n_first :] for ids in sequences]

    def overlap(self, calibration: Any) -> Overlap | None:
        """Compare the prompts with those of a calibration, the entry of a checkpoint's settings. See `overlap`."""
        return overlap(self._plain(self.sequences), self.digest(), calibration)

    def batches(self, batch_size: int, seed: int = 0) -> Iterator[Batch]:
        """Yield the prompts in order. A batch has neighbours of equal length, at most `batch_size`."""
        for numbers in self.plan(batch_size):
            yield self._batch(numbers, seed)

    def first(self, seed: int = 0) -> Batch:
        """Return the first prompt alone."""
        return self._batch([0], seed)

    def _batch(self, numbers: Sequence[int], seed: int) -> Batch:
        import torch  # lazy: loopq imports without torch

        # A copy: prompts of a file are read-only, and torch would warn.
        return Batch(torch.from_numpy(np.stack([self.sequences[i] for i in numbers])), tuple(numbers), seed)

    def plan(self, batch_size: int) -> list[list[int]]:
        """Return the prompt numbers of each batch."""
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1; got {batch_size}")
        plan: list[list[int]] = []
        for number, sequence in enumerate(self.sequences):
            last = plan[-1] if plan else None
            if last and len(last) < batch_size and self.sequences[last[0]].size == sequence.size:
                last.append(number)
            else:
                plan.append([number])
        return plan


def from_ids(ids: Iterable[Any], source: str = "token ids") -> TokenSet:
    """Build a set from sequences of token ids, one prompt each.

    Parameters
    ----------
    ids : iterable of sequences of int
        Token ids of each prompt.
    source : str
        Name of the tokens for the report.

    Examples
    --------
    >>> from_ids([[1, 2, 3], [4, 5]]).plan(batch_size=8)
    [[0], [1]]
    """
    rows = (whole_numbers(row, f"{source}, prompt {number}") for number, row in enumerate(ids))
    return TokenSet(tuple(rows), source, "prompts")


def whole_numbers(given: Any, where: str, n_axes: int = 1) -> NDArray[np.int64]:
    """Return token ids as an array, from a list, an array or a tensor on any device.

    Raises
    ------
    CalibrationError
        They are floats, booleans or complex numbers, such as embeddings or a mask, or have another number of axes.
    """
    try:
        ids = _array(given)
        kind = f"{ids.dtype} {ids.shape}"
    except (TypeError, ValueError):  # bfloat16, which NumPy lacks, or lists of different lengths
        ids, kind = (
            np.asarray(None),
            str(getattr(given, "dtype", "")) or f"{type(given).__name__} {given!r:.60}",
        )
    if isinstance(given, list | tuple) and any(isinstance(i, bool) for i in given):
        ids, kind = np.asarray(None), "booleans"
    # An empty list has the type of floats.
    if ids.ndim != n_axes or (ids.size and ids.dtype.kind not in "iu"):
        axes = "in a list of one axis" if n_axes == 1 else f"of {n_axes} axes"
        raise CalibrationError(f"{where}: token ids are whole numbers {axes}; got {kind}")
    return ids.astype(np.int64)


def _array(given: Any) -> NDArray[Any]:
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    elif isinstance(given, list | tuple):
        given = [_array(i) if hasattr(i, "detach") else i for i in given]
    return np.asarray(given)


def windows(
    text: str, encode: Encode, seq_len: int, n_prompts: int | None, source: str, first: Sequence[int] = ()
) -> TokenSet:
    """Encode a text as one string and cut it into windows.

    Parameters
    ----------
    text : str
        The text to cut.
    encode : callable
        Function from text to token ids. It adds no special tokens.
    seq_len : int
        Tokens of a window. A shorter remainder is dropped.
    n_prompts : int or None
        Number of windows from the start; None keeps all.
    source : str
        Name of the text for the report.
    first : sequence of int
        Special tokens at the start of every window. They count towards its length.

    Raises
    ------
    CalibrationError
        The text has fewer tokens than one window.
    """
    return cut(np.asarray(encode(text), dtype=np.int64), seq_len, n_prompts, source, first)


def cut(
    ids: NDArray[np.int64], seq_len: int, n_prompts: int | None, source: str, first: Sequence[int] = ()
) -> TokenSet:
    """Cut the token ids of one text into windows. Parameters and errors are those of `windows`."""
    if seq_len < 2 + len(first):
        raise ConfigError(f"seq_len must be at least {2 + len(first)}; got {seq_len}")
    check_count(n_prompts)
    width = seq_len - len(first)
    count = ids.size // width
    if n_prompts is not None:
        count = min(count, n_prompts)
    if count == 0:
        raise CalibrationError(f"{source}: {ids.size} tokens make no window of {seq_len}; give more text")
    each = ids[: count * width].reshape(count, width)
    begins = np.broadcast_to(np.asarray(first, dtype=np.int64), (count, len(first)))
    return TokenSet(tuple(np.concatenate([begins, each], axis=1)), source, "windows", n_first=len(first))


def check_count(n_prompts: int | None) -> None:
    """Refuse a number of prompts below 1."""
    if n_prompts is not None and n_prompts < 1:
        raise ConfigError(f"n_prompts must be at least 1; got {n_prompts}")


def check_vocabulary(tokens: TokenSet, n_tokens: int) -> None:
    """Refuse token ids outside the model's vocabulary of `n_tokens` tokens.

    Raises
    ------
    CalibrationError
        An id is below 0 or not below `n_tokens`. The message names the prompt and the position.
    """
    for number, sequence in enumerate(tokens.sequences):
        bad = np.flatnonzero((sequence < 0) | (sequence >= n_tokens))
        if bad.size:
            raise CalibrationError(
                f"{tokens.source}: prompt {number}, position {bad[0]}: token id {sequence[bad[0]]}; the model's ids "
                f"are 0 to {n_tokens - 1}: encode the text with this model's own tokenizer"
            )
