"""Text of a model: its token ids, and its continuation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from loopq.calibrate.given import one_prompt
from loopq.calibrate.prompts import Take, n_vocabulary
from loopq.errors import CheckpointError, ConfigError, model_code
from loopq.models.load import LoadedModel
from loopq.models.text import decode
from loopq.runtime.generate import Decoder, Generation, generate
from loopq.storage.schema import MAX_DIGITS
from loopq.systems.capabilities import marked


class Continuation:
    """Continuation of a prompt by a model. Iteration gives its text piece by piece.

    Parameters
    ----------
    loaded : LoadedModel
        Model, adapter and tokenizer.
    prompt : str or iterable
        Text, token ids, or another prompt of `loopq.calibrate.given.one_prompt`.
    n_steps : int, optional
        Depth. The model's own depth is the default.
    settings : Generation, optional
        Number of tokens, and the sampling rule.

    Attributes
    ----------
    prompt : list of int
        Token ids of the prompt.
    decoder : Decoder
        Gives the logits. It says which cache it uses.
    ids : list of int
        Token ids after the prompt, so far, in the iteration that began last.
    times : list of float
        Seconds of a clock at the start of the iteration, and at each token.

    Raises
    ------
    ConfigError
        The prompt is empty, or the model generates no text.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: str | Iterable[Any],
        n_steps: int | None = None,
        settings: Generation | None = None,
    ) -> None:
        self._loaded, self._settings = loaded, settings or Generation()
        self.prompt = prompt_ids(loaded, prompt)
        self._depth = loaded.system.n_steps if n_steps is None else n_steps
        self.decoder = Decoder(loaded.system, self._depth, self._settings)
        self._used = False
        self.ids: list[int] = []
        self.times: list[float] = []

    def __iter__(self) -> Iterator[str]:
        # Two iterations at once share nothing: the attributes are those of the last one.
        if self._used:
            self.decoder = Decoder(self._loaded.system, self._depth, self._settings)
        self._used = True
        ids, times, decoder = list[int](), [time.perf_counter()], self.decoder
        self.ids, self.times = ids, times
        printed = ""
        for token in generate(self._loaded, self.prompt, decoder, self._settings):
            times.append(time.perf_counter())
            ids.append(token)
            # The last decoded character may wait for its other bytes.
            text = decode(self._loaded, ids)
            if not text.endswith("\ufffd"):
                yield text[len(printed) :]
                printed = text
        yield decode(self._loaded, ids)[len(printed) :]


def prompt_ids(loaded: LoadedModel, prompt: str | Iterable[Any]) -> list[int]:
    """Return the token ids of a prompt, with the tokenizer's special tokens before a text.

    Parameters
    ----------
    loaded : LoadedModel
        Gives the tokenizer, and the tokens that the model needs after the prompt.
    prompt : str or iterable
        Text, token ids, or another prompt of `loopq.calibrate.given.one_prompt`.

    Returns
    -------
    list of int
        Token ids.

    Raises
    ------
    ConfigError
        If the prompt has no tokens, or is no text, or has token ids that the model does not know.
    """
    ids = _encoded(loaded, prompt) if isinstance(prompt, str) else given_ids(loaded, prompt)[0]
    n_known = n_vocabulary(loaded)
    wrong = [i for i in ids if i < 0 or (n_known is not None and i >= n_known)]
    if wrong:
        last = "any" if n_known is None else n_known - 1
        raise ConfigError(f"the prompt has token id {wrong[0]}; the model's ids are 0 to {last}")
    if not ids:
        raise ConfigError("the prompt has no tokens: give at least one character")
    return marked(loaded.system, ids)


def given_ids(loaded: LoadedModel, prompt: Iterable[Any]) -> tuple[list[int], bool]:
    """Return the token ids of one prompt that is no text alone, and whether it has text. See `one_prompt`."""
    return one_prompt(prompt, Take().served(loaded))


def _encoded(loaded: LoadedModel, prompt: str) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError as cause:
        raise ConfigError(f"the prompt is no text in UTF-8, from character {cause.start} on") from None
    if hasattr(loaded.tokenizer, "decode"):
        with model_code("prompt", CheckpointError, "the tokenizer"):
            return list(map(int, loaded.tokenizer(prompt).input_ids))
    return _numbers(prompt) if loaded.no_text else list(loaded.encode(prompt))


def _numbers(prompt: str) -> list[int]:
    """Token ids of a prompt."""
    words = prompt.replace(",", " ").split()
    # Python refuses to convert thousands of digits.
    if not all(word.isdecimal() and len(word) <= MAX_DIGITS for word in words):
        raise ConfigError("no tokenizer beside the model: give the prompt as token ids, as in '5, 17, 3'")
    return [int(word) for word in words]
