"""The public function of the runtime: generate text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from loopq.formats.checkpoint import Checkpoint
from loopq.models.from_python import Opening, open_model
from loopq.models.load import LoadedModel
from loopq.models.plain import plain_modes
from loopq.models.restore import load_checkpoint, open_any
from loopq.run.config import divided
from loopq.runtime.generate import Generation
from loopq.runtime.text import Continuation, given_ids

if TYPE_CHECKING:
    from loopq.api import Model
    from loopq.run.keywords import GenerateKeywords


@overload
def generate(
    model: Model | Checkpoint,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    n_steps: int | None = None,
    **options: Unpack[GenerateKeywords],
) -> str: ...


@overload
def generate(
    model: Model | Checkpoint,
    prompt: Iterable[int],
    *,
    n_steps: int | None = None,
    **options: Unpack[GenerateKeywords],
) -> list[int]: ...


@overload
def generate(
    model: Model | Checkpoint,
    prompt: Iterable[Any],
    *,
    n_steps: int | None = None,
    **options: Unpack[GenerateKeywords],
) -> str | list[int]: ...


def generate(
    model: Model | Checkpoint,
    prompt: str | Iterable[Any],
    *,
    n_steps: int | None = None,
    **options: Unpack[GenerateKeywords],
) -> str | list[int]:
    """Continue a text.

    Parameters
    ----------
    model : str, Path, LoadedModel, LoopedSystem or torch module
        As in `quantize`, or a checkpoint: a folder, or what `quantize` returns. For several calls load it once, by
        ``loopq.load(checkpoint, quantized=True)``.
    prompt : str or iterable
        Text, token ids, a dialogue (a list of messages with "role" and "content", which takes the chat template), or
        another prompt as in `quantize`. Padding of a tokenizer's batch is left out.
    n_steps : int, optional
        Depth. The model's own depth is the default.
    **options
        Settings of `loopq.runtime.generate.Generation`: "n_tokens", "temperature", "top_p", "seed", "exit", "kv".
        "tokenizer" and "trust_remote_code" are those of `quantize`.

    Returns
    -------
    str or list of int
        Text after the prompt, or its token ids if the prompt has token ids. It ends before a token that ends the text.

    Raises
    ------
    ConfigError
        The prompt is empty, the model generates no text, or prompt and text exceed its positions.
    CalibrationError
        The prompt is of another kind, or there are several.

    Notes
    -----
    Layers with codes run on the processor in loopq's runner if it gives the logits of a rollout. Otherwise a cache
    is used, loopq's or the model's own, and without one every token is computed from all earlier ones.

    Examples
    --------
    >>> import loopq
    >>> len(loopq.generate("huginn_small", [84, 104, 101], n_tokens=4))
    4
    """
    settings, opening = divided(options, Generation(), Opening())
    with plain_modes():
        loaded = _opened(model, opening)
        is_text = isinstance(prompt, str)
        if not isinstance(prompt, str):
            prompt, is_text = given_ids(loaded, prompt)
        text = Continuation(loaded, prompt, n_steps, settings)
        written = "".join(text)
    return written if is_text else text.ids


def _opened(model: Model | Checkpoint, opening: Opening) -> LoadedModel:
    trusted = opening.trust_remote_code
    if isinstance(model, Checkpoint):
        return opening.applied(load_checkpoint(model, quantized=True, trust_remote_code=trusted))
    if isinstance(model, str | Path):
        return opening.applied(open_any(model, quantized=True, trust_remote_code=trusted))
    return open_model(model, opening)
