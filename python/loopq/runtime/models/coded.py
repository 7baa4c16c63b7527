"""Modules with codes, for `loopq.models.restore`."""

from __future__ import annotations

from loopq.models.coded import CODED, CodedLayers
from loopq.runtime.quantized import coded, install

CODED.register("modules")(CodedLayers(coded, install))
