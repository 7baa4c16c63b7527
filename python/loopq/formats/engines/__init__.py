"""Programs that run what loopq writes: one module for each. `ENGINES` lists all names."""

from loopq.formats.engines.base import Engine
from loopq.settings.registry import Registry

ENGINES: Registry[Engine] = Registry("engine", "loopq.formats.engines")
