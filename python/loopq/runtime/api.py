"""The public function of the runtime: generate text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, overload

from loopq.models.from_python import open_model
from loopq.models.plain import plain_modes
from loopq.models.restore import open_any
from loopq.run.config import divided
from loopq.runtime.generate import Generation
from loopq.runtime.text import Continuation

if TYPE_CHECKING:
    from loopq.api import Model
    from loopq.run.keywords import GenerateKeywords


@overload
def generate(
    model: Model, prompt: str, *, n_steps: int | None = None, **options: Unpack[GenerateKeywords]
) -> str: ...


@overload
def generate(
    model: Model, prompt: Sequence[int], *, n_steps: int | None = None, **options: Unpack[GenerateKeywords]
) -> list[int]: ...


def generate(
    model: Model,
    prompt: str | Sequence[int],
    *,
    n_steps: int | None = None,
    **options: Unpack[GenerateKeywords],
) -> str | list[int]:
    """Continue a text.

    Parameters
    ----------
    model : str, Path, LoadedModel, LoopedSystem or torch module
        As in `quantize`, or a checkpoint. For several calls load that once, by ``loopq.load(folder, quantized=True)``.
    prompt : str or sequence of int
        Text, or token ids.
    n_steps : int, optional
        Depth. The model's own depth is the default.
    **options
        Settings of `loopq.runtime.generate.Generation`: "n_tokens", "temperature", "top_p", "seed", "exit", "kv".

    Returns
    -------
    str or list of int
        Text after the prompt, or its token ids if the prompt has token ids. It ends before a token that ends the text.

    Raises
    ------
    ConfigError
        The prompt is empty, the model generates no text, or prompt and text exceed its positions.

    Notes
    -----
    Layers with codes run on the processor in loopq's runner if it gives the logits of a rollout. Otherwise the model's
    own cache is used, and without one every token is computed from all earlier ones.

    Examples
    --------
    >>> import loopq
    >>> len(loopq.generate("huginn_small", [84, 104, 101], n_tokens=4))
    4
    """
    (settings,) = divided(options, Generation())
    with plain_modes():
        loaded = open_any(model, quantized=True) if isinstance(model, str | Path) else open_model(model)
        text = Continuation(loaded, prompt, n_steps, settings)
        written = "".join(text)
    return written if isinstance(prompt, str) else text.ids
