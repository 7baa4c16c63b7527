"""Files whose tensors are not those of the class in memory: one module for each kind. `LAYOUTS` lists all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loopq.layers.loop_spec import BASE
from loopq.settings.registry import Registry
from loopq.storage.files import RawTensor

#: Parts of a published module, in the order of its rows.
Parts = Mapping[str, tuple[str, ...]]
#: Turns the tensors of a file into those of another.
Turn = Callable[[Mapping[str, RawTensor]], Mapping[str, RawTensor]]


@dataclass(frozen=True)
class FileLayout:
    """How transformers turns the tensors of a file into those of its class.

    Parameters
    ----------
    renamed : tuple of (str, str or callable)
        Patterns of modules' names, and what stands in the class instead.
    parts : mapping of str to tuple of str
        Modules of the published files that hold several of the class, by rows.
    groups : mapping of str to dict
        Config groups of compressed-tensors that the class needs beside those of its layers. These are then named, since
        the class has linear layers that no file has under that name.
    stacked, unstacked : callable
        Stack the tensors of experts as the files do, and take stacks apart.
    """

    renamed: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = ()
    parts: Parts = field(default_factory=dict)
    groups: Mapping[str, Any] = field(default_factory=dict)
    stacked: Turn = dict
    unstacked: Turn = dict

    def loaded(self, modules: Iterable[str]) -> dict[str, str]:
        """Return the names of modules in the class, where they differ."""
        renamed = {}
        for module in modules:
            name = module
            for pattern, new in self.renamed:
                name = re.sub(pattern, new, name)
            if name != module:
                renamed[module] = name
        return renamed


#: Layouts by `model_type`.
LAYOUTS: Registry[FileLayout] = Registry("layout", "loopq.formats.layouts")


def layout_of(config: Mapping[str, Any]) -> FileLayout:
    """Return the layout of a model's files by its config.json."""
    kind = str(config.get(BASE) or config.get("model_type"))
    return LAYOUTS.get(kind) if kind in LAYOUTS.names() else FileLayout()
