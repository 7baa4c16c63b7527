"""Channel scales that an export folds into the layer before. A guest of the quantizer brings the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from loopq.layers.layer import QuantizedLayer
from loopq.quantizers.task import Task
from loopq.settings.registry import Registry
from loopq.storage.files import RawTensor

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Modules that take scales, by name, and the layers whose scale each of them takes.
Folds: TypeAlias = Mapping[str, Sequence[str]]
#: Layers and other tensors of a checkpoint.
Tensors: TypeAlias = tuple[dict[str, QuantizedLayer], dict[str, RawTensor]]


@dataclass(frozen=True)
class Folding:
    """Folds transforms of one type. Each function raises CheckpointError with the name of a layer that does not fold.

    Parameters
    ----------
    find : callable
        Finds the modules that take the scales, of (model, modules that hold each layer with a scale, rollout).
    refuse_unlike : callable
        Refuses layers of one input that would have scales of their own, of (folds, tasks).
    fold : callable
        Returns layers without scales and the other tensors, of (layers, other tensors, folds, model).
    """

    find: Callable[[nn.Module, Mapping[str, Sequence[str]], Callable[[], Tensor]], Folds]
    refuse_unlike: Callable[[Folds, Sequence[Task]], None]
    fold: Callable[[Mapping[str, QuantizedLayer], Mapping[str, RawTensor], Folds, nn.Module], Tensors]


#: By the type of the transform.
FOLDINGS: Registry[Folding] = Registry("folding", "loopq.quantizers", rooms={"channel_scale": "paper"})
