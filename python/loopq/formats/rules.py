"""Known limits and errors of inference engines, with dates. docs/formats/engines.md prints them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.base import FormatOptions
from loopq.formats.support import DATE, KNOWN, READS, entry_of, is_embedded
from loopq.layers.layer import QuantizedLayer
from loopq.settings.registry import Registry

Layers = Mapping[str, QuantizedLayer]
Config = Mapping[str, Any]
Broken = Callable[[Layers, Config, Collection[str]], Iterable[str]]


@dataclass(frozen=True)
class Rule:
    """One limit or error of an engine.

    Parameters
    ----------
    engines, formats : tuple of str
        Where it holds.
    what : str
        What is not taken.
    instead : str
        What to do.
    known : str
        Version, and source: "run", "config read by its own classes" or "source read".
    broken : callable
        Takes the layers in the format's form, the model's config.json and the names of unchanged tensors. Returns the
        names of layers that break the rule.
    systems : tuple of str
        Affected systems. All if empty.
    names : tuple of str or None
        Values of the option "names" with which the rule holds.
    silent : bool
        Whether the engine gives other logits without an error. Such a file is written only for a named engine.
    """

    engines: tuple[str, ...]
    formats: tuple[str, ...]
    what: str
    instead: str
    known: str
    broken: Broken
    systems: tuple[str, ...] = ()
    names: tuple[str | None, ...] = (None, "published")
    silent: bool = False


def where(test: Callable[[QuantizedLayer], bool]) -> Broken:
    """Layers of which something holds."""
    return lambda layers, config, dense: [name for name, layer in layers.items() if test(layer)]


def named(pattern: str) -> Broken:
    """Layers with a pattern in their name, which stands between points."""
    return lambda layers, config, dense: [name for name in layers if re.search(pattern, f".{name}.")]


def grid_of(layer: QuantizedLayer) -> tuple[object, ...]:
    """What two layers of one matrix must share."""
    return tuple(v for k, v in layer.grid.described().items() if k != "scale_dtype")


#: Limits by the name of their module.
LIMITS: Registry[tuple[Rule, ...]] = Registry("limit", "loopq.formats.limits")


def rules() -> Iterator[Rule]:
    """Return all limits."""
    return (rule for _, limits in LIMITS for rule in limits)


class _Silent(CheckpointError):
    """The engine gives other logits without an error."""


def check_engine(
    engine: str,
    format_name: str,
    layers: Layers,
    system: str | None,
    config: Config | None = None,
    options: FormatOptions | None = None,
    dense: Collection[str] = (),
) -> None:
    """Reject a checkpoint in a format if an engine would reject it or load it wrongly.

    Parameters
    ----------
    layers : mapping of str to QuantizedLayer
        Layers of the checkpoint, or one row of each.
    system : str or None
        Adapter's name. None if unknown.
    config : mapping, optional
        The model's config.json.
    options : FormatOptions, optional
        Of the format. By default none is given.
    dense : collection of str
        Names of tensors that stay unchanged.

    Raises
    ------
    CheckpointError
        If a rule applies. The message names the layer, the engine's limit and a remedy.
    """
    if format_name not in READS[engine]:
        raise CheckpointError(f"{engine} reads {', '.join(READS[engine])}, not {format_name}")
    check_system(engine, format_name, system, config)
    if config is not None and not config.get("model_type"):
        raise CheckpointError(
            f"{engine} opens a model by the model_type in config.json, and this one has none: quantize its folder"
        )
    target = FORMATS.get(format_name)
    options = options or target.values()
    layers = target.stored(layers, options)
    for rule in rules():
        if engine not in rule.engines or format_name not in rule.formats:
            continue
        if options.names not in rule.names:
            continue
        broken = (
            list(rule.broken(layers, config or {}, dense)) if system in (rule.systems or (system,)) else []
        )
        if broken:
            raise (_Silent if rule.silent else CheckpointError)(
                f"{engine} does not take {rule.what} (layer {broken[0]}, {len(broken)} in all; {rule.known}). Instead: "
                f"{rule.instead}"
            )


def check_system(engine: str, format_name: str, system: str | None, config: Config | None) -> None:
    """Reject a system that an engine does not run in a format, whatever its grids are.

    Raises
    ------
    CheckpointError
        The message says what is known.
    """
    if system is not None and system in KNOWN:
        entry = entry_of(engine, system, format_name, config)
        if entry is None or not entry.runs:
            why = f"no support is known ({DATE})" if entry is None else f"{entry.how} ({entry.known})"
            kind = (config or {}).get("model_type")
            raised = _Silent if entry is not None and entry.silent else CheckpointError
            raise raised(f"{engine} does not run {system}{f' ({kind})' if kind else ''}: {why}")


def readers(
    format_name: str,
    layers: Layers,
    system: str | None,
    config: Config,
    options: FormatOptions | None = None,
    dense: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the engines that read a checkpoint in a format right, as far as the table says. As `check_engine`.

    Returns
    -------
    tuple of str
        Names in `READS`. It is empty for the native format, and where loopq alone has the class, and reads the format.

    Raises
    ------
    CheckpointError
        No engine reads this checkpoint right, or one gives other logits without an error. The message has the reason of
        each.
    """
    target = FORMATS.get(format_name)
    if target.own or (target.reads and is_embedded(config)):
        return ()
    try:
        target.stored(layers, options or target.values())
    except CheckpointError:
        # The format itself refuses it, and says why.
        return ()
    able, reasons, silent = [], [], []
    for engine in (engine for engine, formats in READS.items() if format_name in formats):
        try:
            check_engine(engine, format_name, layers, system, config, options, dense)
        except CheckpointError as cause:
            reasons.append(str(cause))
            silent += [str(cause)] if isinstance(cause, _Silent) else []
        else:
            able.append(engine)
    if not able:
        why = "; ".join(reasons) or "none opens the format"
        raise CheckpointError(
            f"no engine reads {format_name} of this model right: {why}. Keep loopq's own format, or "
            "give --force (force=True), which writes the file all the same and says so in it"
        )
    if silent:
        raise CheckpointError(
            f"{'; '.join(silent)}, without an error. {', '.join(able)} can read {format_name} of this model: name the "
            "one that it is for by --for (engine=...), or give --force (force=True)"
        )
    return tuple(able)
