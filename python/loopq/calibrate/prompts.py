"""Calibration and evaluation prompts for a loaded model, in whatever way they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loopq import zoo
from loopq.calibrate.data import TokenSet, check_vocabulary, from_ids, read_tokens, windows
from loopq.errors import ConfigError
from loopq.settings import Settings, setting

if TYPE_CHECKING:
    from loopq.systems.load import LoadedModel

CALIBRATION_PROMPTS = 128
EVALUATION_PROMPTS = 64

#: Prompts, token ids, a path, or None for the text that ships with loopq.
Prompts = TokenSet | Sequence[Sequence[int]] | str | Path | None


@dataclass(frozen=True)
class Take(Settings):
    """Number and length of prompts.

    Parameters
    ----------
    n_prompts : int, optional
        Prompts to take; all when absent, of a text 128 to calibrate and 64 to evaluate.
    seq_len : int
        Tokens of a prompt: a text is cut in windows of this length, and longer prompts to it.
    """

    n_prompts: int | None = setting(None, at_least=1, common=True)
    seq_len: int = setting(128, at_least=2, common=True)


def calibration_tokens(loaded: LoadedModel, prompts: Prompts, take: Take | None = None) -> TokenSet:
    """Read calibration prompts.

    Parameters
    ----------
    loaded : LoadedModel
        Gives the tokenizer and the size of the vocabulary.
    prompts : TokenSet, token ids, path, or None
        A path is read by its kind (`loopq.calibrate.data.read_tokens`); None takes the text that ships with loopq,
        for models that read bytes.
    take : Take, optional
        How much of it.

    Raises
    ------
    ConfigError
        None is given for a model that has a tokenizer.
    CalibrationError
        The file cannot be read, or holds token ids that the model does not have.
    """
    return _tokens(loaded, prompts, take or Take(), CALIBRATION_PROMPTS, zoo.calibration_text)


def evaluation_tokens(loaded: LoadedModel, prompts: Prompts, take: Take | None = None) -> TokenSet:
    """Read held-out prompts; as `calibration_tokens`, with another text of loopq's."""
    return _tokens(loaded, prompts, take or Take(), EVALUATION_PROMPTS, zoo.evaluation_text)


def _tokens(
    loaded: LoadedModel, prompts: Prompts, take: Take, n_default: int, text: Callable[[], bytes]
) -> TokenSet:
    tokens = _read(loaded, prompts, take, n_default, text)
    settings = getattr(loaded.model, "config", None)
    known = loaded.config.get("vocab_size", getattr(settings, "vocab_size", None))
    if isinstance(known, int):
        check_vocabulary(tokens, known)
    return tokens


def _read(
    loaded: LoadedModel, prompts: Prompts, take: Take, n_default: int, text: Callable[[], bytes]
) -> TokenSet:
    if isinstance(prompts, TokenSet):
        return prompts.take(0, take.n_prompts) if take.n_prompts is not None else prompts
    count = n_default if take.n_prompts is None else take.n_prompts
    if prompts is None:
        if loaded.tokenizer is not None:
            raise ConfigError(
                "this model has a tokenizer of its own, and the text that ships with loopq is for models that read "
                "bytes: give it a text (--calibration FILE, --text FILE)"
            )
        name = "embedded evaluation text" if text is zoo.evaluation_text else "embedded calibration text"
        return windows(text().decode(), loaded.encode, take.seq_len, count, name)
    if isinstance(prompts, str | Path):
        return read_tokens(Path(prompts), loaded.encode, take.seq_len, count)
    return from_ids(list(prompts)[: take.n_prompts])
