"""Calibration and evaluation prompts for a loaded model, in whatever way they are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq import zoo
from loopq.calibrate.data import TokenSet, check_vocabulary, cut, from_ids, windows
from loopq.calibrate.read import Served, read_tokens
from loopq.calibrate.written import written
from loopq.errors import ConfigError
from loopq.settings.declare import Settings, setting

if TYPE_CHECKING:
    from loopq.models.load import LoadedModel

CALIBRATION_PROMPTS = 128
EVALUATION_PROMPTS = 64
#: Tokens of a chunk of `evaluation_chunks`, and more chunks than a text has.
CHUNK, _ALL = 512, 1 << 62
#: Share of the tokens of a calibration text that are drawn at random, where no share is asked for.
RANDOM_TOKENS = 0.05

#: Prompts, token ids of each or of one text, a path, or None for the model's own prompts, else for the text that ships
#: with loopq.
Prompts = TokenSet | Sequence[Sequence[int]] | Sequence[int] | str | Path | None
#: In the place of a path: prompts that the model writes.
SELF = "self"
#: Gives a model prompts of its task: model, "calibration" or "evaluation", number of prompts, and number of the draw.
PromptSource = Callable[["LoadedModel", str, int, int], TokenSet]
_SOURCES: dict[str, PromptSource] = {}


@dataclass(frozen=True)
class Take(Settings):
    """Number and length of prompts.

    Parameters
    ----------
    n_prompts : int, optional
        Prompts to take; all when absent, of a text 128 to calibrate and 64 to evaluate.
    seq_len : int
        Tokens of a prompt: a text is cut in windows of this length, and longer prompts to it.
    field : str, optional
        Fields of a record of jsonl or parquet that hold its text, joined by commas ("question,answer"); when absent
        "text", else all that hold text.
    template : bool
        Apply the tokenizer's chat template to each record: to its "messages", or to its fields as what user and
        assistant say in turn.
    """

    n_prompts: int | None = setting(None, at_least=1, common=True)
    seq_len: int = setting(128, at_least=2, common=True)
    field: str | None = setting(None)
    template: bool = setting(False)

    def served(self, loaded: LoadedModel) -> Served:
        """How text becomes token ids of a model."""
        return Served.of(loaded.encode, loaded.tokenizer, self.field or "", self.template)


@dataclass(frozen=True)
class CalibrationTake(Take):
    """Number and length of calibration prompts, and what is changed in them.

    Parameters
    ----------
    random_tokens : float, optional
        Share of the tokens of a calibration text that are replaced by tokens drawn from the whole vocabulary; when
        absent 0.05 of a text that loopq cuts, nothing of prompts, and nothing with preset paper.

    Notes
    -----
    A text lacks most tokens of a vocabulary, and what layers do with them is held by no Hessian: a few random ones
    take a third off the KL on text of another kind (docs/next.md).
    """

    random_tokens: float | None = setting(None, at_least=0.0, at_most=0.5)


def register_prompts(model_type: str, source: PromptSource) -> None:
    """Let models whose ``config.json`` has this `model_type` be calibrated and measured on prompts of their task.

    Parameters
    ----------
    model_type : str
        Of the models.
    source : callable
        Takes the loaded model, "calibration" or "evaluation", the number of prompts, and the number of the draw: each
        has calibration prompts of its own, none of which is an evaluation prompt. Gives the prompts; `scored_from` of
        them says where questions end.

    Raises
    ------
    ConfigError
        The type has its prompts.
    """
    if model_type in _SOURCES:
        raise ConfigError(f"prompts of model_type {model_type!r} are registered twice")
    _SOURCES[model_type] = source


def own_prompts(loaded: LoadedModel) -> PromptSource | None:
    """Return what gives a model prompts of its task; None for a model of text."""
    return _SOURCES.get(str(loaded.config.get("model_type", "")))


def calibration_tokens(
    loaded: LoadedModel, prompts: Prompts, take: Take | None = None, *, matters: bool = True
) -> TokenSet:
    """Read calibration prompts.

    Parameters
    ----------
    loaded : LoadedModel
        Gives the tokenizer and the size of the vocabulary.
    prompts : TokenSet, token ids, path, or None
        A path is read by its kind (`loopq.calibrate.read.read_tokens`); "self" lets the model write them; None takes
        those of `register_prompts`, else the text that ships with loopq, for models that read bytes.
    take : Take, optional
        How much of it; a `CalibrationTake` also says which share of random tokens, and a `Take` leaves all as it is.
    matters : bool
        Whether codes depend on it. Where they do not, one prompt shows which layers are called, and any text will do.

    Raises
    ------
    ConfigError
        None is given for a model that has a tokenizer, and the text matters; or random tokens are asked for where the
        model does not say how many there are, or in prompts that are no text.
    CalibrationError
        The file cannot be read, or holds token ids that the model does not have.
    """
    take = take or Take()
    if prompts is None and not matters and loaded.tokenizer is not None and own_prompts(loaded) is None:
        text = zoo.calibration_text().decode()
        first = take.served(loaded).first
        return windows(
            text, loaded.encode, take.seq_len, take.n_prompts or 1, "embedded calibration text", first
        )
    tokens = _tokens(loaded, prompts, take, "calibration")
    if not isinstance(take, CalibrationTake):
        return tokens
    share, known = take.random_tokens, _known_tokens(loaded)
    if share is None:
        # Tokens that are given stay as they are, and so do prompts: these have marks in their places.
        cut = not isinstance(prompts, TokenSet) and tokens.packing == "windows" and matters
        share = RANDOM_TOKENS if cut and known is not None else 0.0
    if not share:
        return tokens
    if known is None:
        raise ConfigError("random_tokens: the model's config has no vocab_size")
    return tokens.with_random_tokens(share, known)


def evaluation_tokens(loaded: LoadedModel, prompts: Prompts, take: Take | None = None) -> TokenSet:
    """Read held-out prompts; as `calibration_tokens`, with another text of loopq's."""
    return _tokens(loaded, prompts, take or Take(), "evaluation")


def evaluation_chunks(loaded: LoadedModel, prompts: Prompts, take: Take | None = None) -> TokenSet:
    """Read a held-out text in chunks of 512 tokens, as llama.cpp's llama-perplexity does; as `evaluation_tokens`.

    The text begins with the tokenizer's special tokens. They also replace the first tokens of every chunk. The first
    half of a chunk is context and is not scored.

    Raises
    ------
    ConfigError
        These are prompts, not a text.
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
    known = _n_vocabulary(loaded)
    if known is not None:
        check_vocabulary(tokens, known)
    return tokens


def _n_vocabulary(loaded: LoadedModel) -> int | None:
    settings = getattr(loaded.model, "config", None)
    known = loaded.config.get("vocab_size", getattr(settings, "vocab_size", None))
    return known if isinstance(known, int) else None


def _known_tokens(loaded: LoadedModel) -> NDArray[np.int64] | None:
    """Token ids that a text can hold: not the marks of a tokenizer, nor the rows that only fill up a table."""
    n_rows = _n_vocabulary(loaded)
    if n_rows is None:
        return None
    tokenizer = loaded.tokenizer
    marks = {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", ())}
    n_known = len(tokenizer) if hasattr(tokenizer, "__len__") else n_rows
    return np.setdiff1d(np.arange(min(n_rows, n_known)), sorted(marks))


def _read(loaded: LoadedModel, prompts: Prompts, take: Take, use: str, served: Served) -> TokenSet:
    if isinstance(prompts, TokenSet):
        return prompts.take(0, take.n_prompts) if take.n_prompts is not None else prompts
    count = take.n_prompts
    if count is None:
        count = CALIBRATION_PROMPTS if use == "calibration" else EVALUATION_PROMPTS
    if prompts is None:
        own = own_prompts(loaded)
        if own is not None:
            return own(loaded, use, count, 0)
        if loaded.tokenizer is not None:
            raise ConfigError(
                "this model has a tokenizer of its own, and the text that ships with loopq is for models that read "
                "bytes: give it a text (--calibration FILE, --text FILE)"
            )
        text = zoo.calibration_text() if use == "calibration" else zoo.evaluation_text()
        return windows(text.decode(), served.encode, take.seq_len, count, f"embedded {use} text")
    if isinstance(prompts, str) and prompts == SELF and use == "calibration":
        known = _known_tokens(loaded)
        if known is None:
            raise ConfigError("calibration 'self': the model's config has no vocab_size; give a file")
        return written(loaded.system, served.first, known, take.seq_len, count)
    if isinstance(prompts, str | Path):
        return read_tokens(Path(prompts), served, take.seq_len, count)
    given: list[Any] = list(prompts)
    if given and all(np.ndim(ids) == 0 for ids in given):
        whole = np.asarray([int(i) for i in given], dtype=np.int64)
        return cut(whole, min(take.seq_len, whole.size), count, "token ids")
    return from_ids(given[: take.n_prompts])
