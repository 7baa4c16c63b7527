"""SGLang. It has no build for processors that loopq could ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Engine, Way

_SERVES = "python -m sglang.launch_server --model-path OUT"


class SGLang(Engine):
    """SGLang's server. What it takes is known from its source alone (docs/formats/engines.md)."""

    name: ClassVar[str] = "sglang"
    ways: ClassVar[tuple[Way, ...]] = (
        Way("compressed-tensors", _SERVES),
        Way("compressed-tensors", _SERVES, {"names": "published"}),
    )

    def logits(
        self, path: Path, ids: NDArray[np.int64], trust_remote_code: bool, states: NDArray[np.float32] | None
    ) -> tuple[NDArray[Any], Sequence[int], str]:
        """It is never asked."""
        raise NotImplementedError(self.name)


ENGINES.register(SGLang.name)(SGLang())
