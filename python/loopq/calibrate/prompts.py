"""Calibration and evaluation prompts for a loaded model, from any kind of source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq import zoo
from loopq.calibrate.calls import CallSet, given_calls
from loopq.calibrate.data import TokenSet, check_vocabulary, windows
from loopq.calibrate.given import given_tokens
from loopq.calibrate.mixed import mixed
from loopq.calibrate.read import Served, check_source, read_tokens
from loopq.calibrate.written import written
from loopq.errors import ConfigError
from loopq.settings.declare import Settings, setting

if TYPE_CHECKING:
    from loopq.models.load import LoadedModel

CALIBRATION_PROMPTS = 128
EVALUATION_PROMPTS = 64
#: Tokens of a chunk of `evaluation_chunks`, and a number above the chunks of any text.
CHUNK, _ALL = 512, 1 << 62
#: Default share of random tokens in a calibration text.
RANDOM_TOKENS = 0.05

#: Prompts: a set, a path, or what Python holds (`loopq.calibrate.given`): token ids of each prompt or of one text,
#: texts, records, dialogues, a tokenizer's batch, a Dataset, a DataLoader; or calls of a module that takes no token ids
#: (`loopq.calibrate.calls`). With None they are the model's own prompts,
#: or else the text that ships with loopq.
Prompts = TokenSet | str | Path | Iterable[Any] | None
#: Instead of a path: prompts that the model writes.
SELF = "self"
#: Returns prompts of a model's task. Takes model, "calibration" or "evaluation", number of prompts, number of the draw.
PromptSource = Callable[["LoadedModel", str, int, int], TokenSet]
_SOURCES: dict[str, PromptSource] = {}


@dataclass(frozen=True)
class Take(Settings):
    """Number and length of prompts.

    Parameters
    ----------
    n_prompts : int, optional
        Number of prompts; all when absent, of a text 128 for calibration and 64 for evaluation.
    seq_len : int
        Tokens of a prompt: a text is cut into windows of this length, and longer prompts are truncated to it.
    field : str, optional
        Text fields of a jsonl or parquet record, joined by commas ("question,answer"). The default is "text", or all
        text fields if there is no "text".
    template : bool
        Apply the tokenizer's chat template to each record. It uses the record's "messages", or its fields as turns of
        user and assistant. Records with "messages" and no "text" take it anyway.
    """

    n_prompts: int | None = setting(None, at_least=1, common=True)
    seq_len: int = setting(128, at_least=2, common=True)
    field: str | None = setting(None)
    template: bool = setting(False)

    def served(self, loaded: LoadedModel) -> Served:
        """Return the conversion of text to token ids of a model."""
        return Served.of(loaded.encode, loaded.tokenizer, self.field or "", self.template)


@dataclass(frozen=True)
class CalibrationTake(Take):
    """Number and length of calibration prompts, and their share of random tokens.

    Parameters
    ----------
    random_tokens : float, optional
        Share of a calibration text's tokens that are replaced by tokens drawn from the whole vocabulary. The default is
        0.05 for a text that loopq cuts. It is 0 for prompts and with preset paper.

    Notes
    -----
    A text lacks most tokens of a vocabulary, so no Hessian covers them. A few random tokens reduce the KL on another
    kind of text by a third (docs/next.md).
    """

    random_tokens: float | None = setting(None, at_least=0.0, at_most=0.5)


def register_prompts(model_type: str, source: PromptSource) -> None:
    """Register task prompts for calibration and evaluation of models with this `model_type` in ``config.json``.

    Parameters
    ----------
    model_type : str
        Type of the models.
    source : callable
        Takes the loaded model, "calibration" or "evaluation", the number of prompts, and the number of the draw. Each
        draw has its own calibration prompts, which are no evaluation prompts. Returns the prompts; their `scored_from`
        says where questions end.

    Raises
    ------
    ConfigError
        The type already has prompts.
    """
    if model_type in _SOURCES:
        raise ConfigError(f"prompts of model_type {model_type!r} are registered twice")
    _SOURCES[model_type] = source


def own_prompts(loaded: LoadedModel) -> PromptSource | None:
    """Return the source of a model's task prompts; None for a text model."""
    return _SOURCES.get(str(loaded.config.get("model_type", "")))


def check_prompts(prompts: Prompts, take: Take | None = None) -> None:
    """Refuse a path that holds no prompts, before a model is loaded. Errors are those of `calibration_tokens`."""
    if isinstance(prompts, str | Path) and prompts != SELF:
        take = take or Take()
        check_source(Path(prompts), take.field or "", take.template)


def calibration_tokens(
    loaded: LoadedModel, prompts: Prompts, take: Take | None = None, *, matters: bool = True
) -> TokenSet:
    """Read calibration prompts.

    Parameters
    ----------
    loaded : LoadedModel
        The model. It provides the tokenizer and the size of the vocabulary.
    prompts : TokenSet, path, iterable, or None
        A path is read by its kind (`loopq.calibrate.read.read_tokens`). With "self" the model writes the prompts. None
        takes those of `register_prompts`, or else the text that ships with loopq. Anything else is taken by
        `loopq.calibrate.given.given_tokens`.
    take : Take, optional
        Number and length. A `CalibrationTake` also sets the share of random tokens. A plain `Take` adds none.
    matters : bool
        Whether codes depend on the prompts. If not, one prompt of any text shows which layers are called.

    Raises
    ------
    ConfigError
        Random tokens are requested although the vocabulary size is unknown, or for prompts that are not text.
    CalibrationError
        The file cannot be read, or holds token ids outside the vocabulary.
    """
    take = take or Take()
    if prompts is None and not matters and loaded.tokenizer is not None and own_prompts(loaded) is None:
        take = dataclasses.replace(take, n_prompts=take.n_prompts or 1)
    tokens = _tokens(loaded, prompts, take, "calibration")
    if not isinstance(take, CalibrationTake):
        return tokens
    share, known = take.random_tokens, _known_tokens(loaded)
    if share is None:
        # Given tokens stay unchanged, and so do prompts: their marks must keep their places.
        cut = not isinstance(prompts, TokenSet) and tokens.packing == "windows" and matters
        share = RANDOM_TOKENS if cut and known is not None else 0.0
    if not share:
        return tokens
    if known is None:
        raise ConfigError("random_tokens: the model's config has no vocab_size; set random_tokens=0")
    return tokens.with_random_tokens(share, known)


def evaluation_tokens(loaded: LoadedModel, prompts: Prompts, take: Take | None = None) -> TokenSet:
    """Read held-out prompts. It works like `calibration_tokens`, with another built-in text."""
    return _tokens(loaded, prompts, take or Take(), "evaluation")


def evaluation_chunks(loaded: LoadedModel, prompts: Prompts, take: Take | None = None) -> TokenSet:
    """Read a held-out text in chunks of 512 tokens, as llama.cpp's llama-perplexity does. See `evaluation_tokens`.

    The text begins with the tokenizer's special tokens. They also replace the first tokens of every chunk. The first
    half of a chunk is context and is not scored.

    Raises
    ------
    ConfigError
        The source holds prompts instead of a text.
    """
    take = take or Take(seq_len=CHUNK)
    if take.seq_len < 4:
        raise ConfigError(f"seq_len {take.seq_len}: half of a chunk is context; give at least 4 tokens")
    served = take.served(loaded)
    first, encode = served.first, served.encode
    whole = dataclasses.replace(served, encode=lambda text: [*first, *encode(text)], first=())
    tokens = _tokens(loaded, prompts, take.changed(n_prompts=take.n_prompts or _ALL), "evaluation", whole)
    if tokens.packing != "windows":
        raise ConfigError(
            f"{tokens.source}: chunks are cut from a text, and this has prompts; give a text file"
        )
    begun = tuple(
        np.concatenate([np.asarray(first, np.int64), ids[len(first) :]]) for ids in tokens.sequences
    )
    half = take.seq_len // 2
    return dataclasses.replace(
        tokens, sequences=begun, packing="chunks", scored_from=half, n_first=len(first)
    )


def _tokens(
    loaded: LoadedModel, prompts: Prompts, take: Take, use: str, served: Served | None = None
) -> TokenSet:
    tokens = _read(loaded, prompts, take, use, served or take.served(loaded))
    if not isinstance(prompts, TokenSet) and take.n_prompts != _ALL:
        asked = take.n_prompts if isinstance(tokens, CallSet) else _count(take, use)
        tokens = dataclasses.replace(tokens, n_asked=asked)
    known = n_vocabulary(loaded)
    if known is not None and not isinstance(tokens, CallSet):
        check_vocabulary(tokens, known)
    return tokens


def _count(take: Take, use: str) -> int:
    if take.n_prompts is not None:
        return take.n_prompts
    return CALIBRATION_PROMPTS if use == "calibration" else EVALUATION_PROMPTS


def n_vocabulary(loaded: LoadedModel) -> int | None:
    settings = getattr(loaded.model, "config", None)
    known = loaded.config.get("vocab_size", getattr(settings, "vocab_size", None))
    return known if isinstance(known, int) else None


def _known_tokens(loaded: LoadedModel) -> NDArray[np.int64] | None:
    """Token ids that a text can hold, without special tokens and without padding rows of the embedding."""
    n_rows = n_vocabulary(loaded)
    if n_rows is None:
        return None
    tokenizer = loaded.tokenizer
    marks = {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", ())}
    n_known = len(tokenizer) if hasattr(tokenizer, "__len__") else n_rows
    return np.setdiff1d(np.arange(min(n_rows, n_known)), sorted(marks))


def _read(loaded: LoadedModel, prompts: Prompts, take: Take, use: str, served: Served) -> TokenSet:
    if isinstance(prompts, TokenSet):
        return prompts.take(0, take.n_prompts) if take.n_prompts is not None else prompts
    count = _count(take, use)
    if prompts is None:
        make = own_prompts(loaded)
        if make is not None:
            return make(loaded, use, count, 0)
        if loaded.tokenizer is not None:
            return mixed(use, served, take.seq_len, None if count == _ALL else count)
        text = zoo.calibration_text() if use == "calibration" else zoo.evaluation_text()
        return windows(text.decode(), served.encode, take.seq_len, count, f"embedded {use} text")
    if isinstance(prompts, str) and prompts == SELF and use == "calibration":
        known = _known_tokens(loaded)
        if known is None:
            raise ConfigError("calibration 'self': the model's config has no vocab_size; give a file")
        return written(loaded.system, served.first, known, take.seq_len, count)
    if isinstance(prompts, str | Path):
        return read_tokens(Path(prompts), served, take.seq_len, count)
    calls, given = given_calls(prompts, count)
    if calls is not None:
        return CallSet.of(loaded, calls[: take.n_prompts])
    return given_tokens(given, served, take.seq_len, take.n_prompts, count)
