"""Optional capabilities of a system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Text to token ids.
Encode = Callable[[str], Sequence[int]]
Tensors: TypeAlias = "dict[str, Tensor]"
#: Takes the state after a step and the logits read from it, (width) and (vocabulary) of one token, and a threshold.
ExitRule: TypeAlias = "Callable[[Tensor, Tensor, float], bool]"


@dataclass(frozen=True)
class ModelClass:
    """Builds a model from its ``config.json`` and fills it from its files.

    Parameters
    ----------
    build : callable
        Takes the contents of ``config.json`` and returns the model with arbitrary weights.
    encode : callable, optional
        Text to token ids, for folders without a tokenizer.
    rename : callable, optional
        Takes the stored tensors by name and returns them under the model's names.
    """

    build: Callable[[dict[str, Any]], nn.Module]
    encode: Encode | None = None
    rename: Callable[[Tensors], Tensors] | None = None
