"""The models of a table with their calibration, tuning and evaluation texts. No prompt is in two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq import zoo
from loopq.calibrate.data import TokenSet, windows
from loopq.calibrate.prompts import own_prompts
from loopq.calibrate.read import Served, read_tokens
from loopq.errors import ConfigError
from loopq.models.load import LoadedModel, load_model
from loopq.paper.plbert import PLBERT, load_plbert, phonemes

#: Takes the data folder, and options of `load_model` by their names.
Opener = Callable[..., LoadedModel]
_OPENERS: dict[str, Opener] = {PLBERT: load_plbert}


@dataclass(frozen=True)
class PreparedModel:
    """A model of a table with its prompts.

    Parameters
    ----------
    name : str
        Its name in the table.
    calibration : TokenSet
        Prompts for Hessians and gradients.
    tuning_held_out : TokenSet
        Prompts that decide what to keep of a gradient fit.
    evaluation : TokenSet
        Prompts for the table's measurements.
    """

    name: str
    loaded: LoadedModel
    calibration: TokenSet
    tuning_held_out: TokenSet
    evaluation: TokenSet

    @property
    def task(self) -> str:
        """Name of the measured data: "text", or the source of the evaluation prompts."""
        return self.evaluation.source if self.evaluation.scored_from else "text"


@dataclass(frozen=True)
class Sizes:
    """Prompts of each set, and tokens of a prompt."""

    n_calibration: int = 64
    n_tuning_held_out: int = 16
    n_evaluation: int = 32
    seq_len: int = 128


@dataclass(frozen=True)
class OpenedModel:
    """A loaded model and the source of its prompts.

    Parameters
    ----------
    name : str
        Its name in the table.
    data : Path or None
        Data folder.
    calibration, text : Path or None
        Calibration and evaluation texts. The texts shipped with loopq when absent.
    planted, planted_in : str, tuple of str
        Kind of planted outlier (`loopq.paper.planted`) and its weights. Empty for an unchanged model.
    """

    name: str
    loaded: LoadedModel
    data: Path | None = None
    calibration: Path | None = None
    text: Path | None = None
    planted: str = ""
    planted_in: tuple[str, ...] = ()

    def prompts(self, sizes: Sizes, draw: int = 0) -> PreparedModel:
        """Cut the prompts. Each draw has different calibration prompts."""
        count, cut = sizes.n_calibration + sizes.n_tuning_held_out, sizes.n_calibration
        make = own_prompts(self.loaded)
        if make is not None and self.calibration is None and self.text is None:
            text = make(self.loaded, "calibration", count, draw)
            held_out = make(self.loaded, "evaluation", sizes.n_evaluation, draw)
        else:
            text, held_out = (self._phonemes if self.name.partition("+")[0] == PLBERT else self._text)(
                sizes, (draw + 1) * count
            )
            text = _stretch(text, draw, count)
        return PreparedModel(self.name, self.loaded, text.take(0, cut), text.take(cut), held_out)

    def _text(self, sizes: Sizes, count: int) -> tuple[TokenSet, TokenSet]:
        length = min(sizes.seq_len, int(self.loaded.config.get("block_size", sizes.seq_len)))

        def cut(file: Path | None, embedded: bytes, what: str, n: int) -> TokenSet:
            if file is not None:
                return read_tokens(file, Served(self.loaded.encode), length, n)
            return windows(embedded.decode(), self.loaded.encode, length, n, what)

        return (
            cut(self.calibration, zoo.calibration_text(), "embedded calibration text", count),
            cut(self.text, zoo.evaluation_text(), "embedded evaluation text", sizes.n_evaluation),
        )

    def _phonemes(self, sizes: Sizes, count: int) -> tuple[TokenSet, TokenSet]:
        return (
            phonemes(self.data, "calibration", sizes.seq_len, count),
            phonemes(self.data, "evaluation", sizes.seq_len, sizes.n_evaluation),
        )


def register_source(name: str, opener: Opener) -> None:
    """Register a model that no folder holds, such as one that a package brings.

    Its prompts are those of `loopq.calibrate.prompts.register_prompts` for the `model_type` in its `config`.

    Raises
    ------
    ConfigError
        The name is taken.
    """
    if name in _OPENERS:
        raise ConfigError(f"the model {name!r} is registered twice")
    _OPENERS[name] = opener


def open_source(
    name: str,
    data: Path | None = None,
    calibration: Path | None = None,
    text: Path | None = None,
    **loading: Any,
) -> OpenedModel:
    """Load a model.

    Parameters
    ----------
    name : str
        Name of the embedded model, folder, or hub id. "plbert" is the real checkpoint; `register_source`
        adds others.
    data : Path, optional
        Data folder. "plbert" is read from its `models/plbert_kokoro`.
    calibration, text : Path, optional
        Texts that replace those shipped with loopq.
    **loading
        Options of `loopq.models.load.load_model`.

    Raises
    ------
    ConfigError
        If "plbert" has no data folder.
    """
    if name in _OPENERS:
        return OpenedModel(name, _OPENERS[name](data, **loading), data)
    return OpenedModel(Path(name).name, load_model(name, **loading), data, calibration, text)


def _stretch(text: TokenSet, draw: int, count: int) -> TokenSet:
    if (draw + 1) * count > len(text.sequences):
        raise ConfigError(
            f"{text.source} has {len(text.sequences)} prompts: draw {draw} of {count} prompts each is beyond its end"
        )
    return text.take(draw * count, (draw + 1) * count)
