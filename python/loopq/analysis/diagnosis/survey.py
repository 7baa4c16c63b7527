"""The diagnosis of a model or a dump, section by section, as plain data of a report."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.estimate import estimate as estimate_sections
from loopq.analysis.diagnosis.sections import SECTIONS, in_order
from loopq.analysis.diagnosis.sections.ranks import dump_ranks
from loopq.analysis.diagnosis.verdict import judge, returned, summary
from loopq.analysis.diagnosis.weights import input_blocks
from loopq.calibrate.dump import Dump
from loopq.errors import ConfigError, MissingExtraError, NonFiniteError, SystemContractError
from loopq.layers.grid import PER_CHANNEL
from loopq.layers.shared import SharedParameter
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal, fingerprint, version_of
from loopq.storage.schema import Object
from loopq.systems.base import LoopedSystem
from loopq.systems.stepwise import steps_of
from loopq.terminal.progress import Progress

FORMAT = "loopq-diagnosis"
VERSION = 1


@dataclass(frozen=True)
class _Outcome:
    """Results by section, unavailable parts with the reason, the estimate, and seconds by section."""

    done: Object
    unavailable: list[dict[str, str]]
    estimate: Object
    seconds: dict[str, float]


def diagnose(context: Context, *, only: Sequence[str] | None = None, name: str = "") -> Object:
    """Diagnose a looped model.

    Parameters
    ----------
    context : Context
        Model, prompts and settings. All prompts enter the Hessians. Comparisons of weights use the first few. Without
        a single-step function the sections that intervene in the loop are left out. The trained rank-4 update needs
        training prompts. `unavailable` lists what was left out and why. Finished sections are saved in the work folder
        of the execution. An interrupted diagnosis of the same weights, prompts and settings resumes from it.
    only : sequence of str, optional
        Sections to run (`SECTIONS`). All when absent.
    name : str
        Name of the model in the report.

    Returns
    -------
    dict
        Plain data, format `loopq-diagnosis`. See `analysis/report/schema.json` and docs/diagnose.md.

    Raises
    ------
    ConfigError
        If a section does not exist.
    """
    system, config, execution = context.system, context.config, context.execution
    depth = system.check_depth(context.n_steps)
    run, unavailable = _possible(system, context, _wanted(only))
    estimate = estimate_sections(context, run)
    execution.progress.note(_estimate_line(estimate))
    train = context.train.digest() if context.train else None
    journal = Journal(execution.work, fingerprint(context.fingerprint(), config.to_json(), train))
    outcome = _Outcome({}, unavailable, estimate, {})
    for section in run:
        began = time.monotonic()
        compute = partial(SECTIONS.get(section).run, context)
        try:
            outcome.done[section] = _resumed(journal, section, execution.progress, compute)
        except (ConfigError, MissingExtraError, NonFiniteError, SystemContractError) as error:
            # A failing section does not discard the results of the others.
            unavailable.append({"section": section, "reason": str(error)})
            continue
        outcome.seconds[section] = round(time.monotonic() - began, 3)
    model = {
        "name": name or type(system.model).__name__,
        "system": system.name,
        "n_steps": depth,
        "n_parameters": sum(p.numel() for p in system.model.parameters()),
        "dtype": str(next(system.model.parameters()).dtype).removeprefix("torch."),
        "has_steps": steps_of(system) is not None,
        "output": system.output,
        "state_is_random": system.state_is_random,
    }
    layers = _layers(context.parameters, outcome.done, config)
    settings = json_settings(config, execution)
    return _assemble(model, layers, context.tokens.describe(), settings, outcome)


def diagnose_dump(
    folder: Path, *, config: DiagnoseConfig | None = None, execution: Execution | None = None
) -> Object:
    """Diagnose a dump of rows, or of Hessians stored step by step, by ranks, spectra, proxies and magnitudes.

    Needs SciPy but not torch.
    """
    config, execution = config or DiagnoseConfig(), execution or Execution()
    dump = Dump(folder, threads=execution.threads)
    m = dump.manifest
    began = time.monotonic()
    done = {"ranks": clean(dump_ranks(dump, config, execution))}
    seconds = {"ranks": round(time.monotonic() - began, 3)}
    reason = "a dump holds activations and weights, not the model's code: no rollout can be run"
    unavailable = [{"section": s, "reason": reason} for s in in_order() if s != "ranks"]
    model = {
        "name": folder.name,
        "system": m.system,
        "n_steps": m.n_steps,
        "n_parameters": None,
        "dtype": m.rows_dtype,
        "has_steps": False,
        "output": None,
        "state_is_random": None,
    }
    layers = _layers(m.parameters, done, config)
    settings = json_settings(config, execution) | {"seed": m.seed}
    return _assemble(model, layers, dict(m.calibration), settings, _Outcome(done, unavailable, {}, seconds))


def json_settings(config: DiagnoseConfig, execution: Execution) -> Object:
    """Settings as plain data, with the execution settings that a report names."""
    how = {"batch_size": execution.batch_size, "seed": execution.seed, "threads": execution.threads}
    plain: Object = clean(config.to_json() | how)
    return plain


def _wanted(only: Sequence[str] | None) -> list[str]:
    known = list(in_order())
    if only is None:
        return known
    unknown = [s for s in only if s not in known]
    if unknown or not only:
        raise ConfigError(
            f"unknown section {', '.join(unknown) or '(none given)'}; known: {', '.join(known)}"
        )
    return [s for s in known if s in only]


def _possible(
    system: LoopedSystem, context: Context, wanted: Sequence[str]
) -> tuple[list[str], list[dict[str, str]]]:
    """Split the sections into possible ones and impossible ones, with the reason."""
    unavailable = []
    run = []
    steps = steps_of(system)
    for name in wanted:
        section = SECTIONS.get(name)
        lacks = "single-step function" * bool(section.loop and steps is None)
        if lacks := lacks or "state of fixed size" * bool(section.square and steps and steps.grows):
            reason = f"system {system.name!r} has no {lacks}, which {section.loop} needs"
            unavailable.append({"section": name, "reason": reason})
        elif section.exposed and not context.exposed:
            reason = "no shared layer is feedback-exposed: each has an identity path around it"
            unavailable.append({"section": name, "reason": reason})
        else:
            run.append(name)
    return run, unavailable + _missing_parts(system, run)


def _missing_parts(system: LoopedSystem, run: Sequence[str]) -> list[dict[str, str]]:
    """Parts of the running sections that the system does not allow, with the reason."""
    compared = [s for s in run if SECTIONS.get(s).compares]
    parts = []
    if compared and system.output != "logits":
        reason = (
            f"system {system.name!r} returns hidden states and no logits: there is no predicted token to compare; the "
            "relative error of the output is given instead"
        )
        parts.append({"section": "agreement and KL", "reason": reason})
    if "injection" in compared and not system.state_is_random:
        reason = (
            "the initial state is not random: every run starts from its reference's state, so all are paired"
        )
        parts.append({"section": "unpaired runs", "reason": reason})
    return parts


def _resumed(journal: Journal, section: str, progress: Progress, compute: Callable[[], Object]) -> Object:
    saved = journal.find(section)
    if saved is not None:
        progress.note(f"{section}: read from {journal.folder}")
        data: Object = saved.facts["data"]
        return data
    fresh: Object = clean(compute())
    journal.save(section, data=fresh)
    return fresh


def _layers(
    parameters: Sequence[SharedParameter], done: Mapping[str, Any], config: DiagnoseConfig
) -> list[Object]:
    ranks = done.get("ranks", {})
    ablation = done.get("ablation", {})
    ratio = _feedback_ratio(done.get("feedback", {}))
    noise = _noise(done.get("overlap", {}))
    out = []
    for p in parameters:
        group = ranks.get("input_groups", {}).get(p.name)
        layer_ranks = ranks.get("layers", {}).get(group)
        layer: Object = {
            "name": p.name,
            "owners": list(p.owners),
            "role": p.role,
            "shape": [p.out_features, p.in_features],
            "invocations": p.invocations,
            "exposed": p.exposed,
            "treatment": p.treatment,
            "reason": p.reason
            or "no token was sent to it" * bool(p.routed_in and ranks and layer_ranks is None),
            "routed_in": p.routed_in,
            "input_of": group,
            "feedback_ratio": ratio if p.exposed else None,
            "noise": noise if p.exposed and input_blocks(p) else None,
            "ablation": None,
            "proxy": ranks.get("proxies", {}).get(p.name),
            "solved": ranks.get("solved", {}).get(p.name),
        }
        if p.name in ablation.get("layers", {}):
            layer["ablation"] = ablation["layers"][p.name] | {
                "place": ablation["table"]["places"][p.name]["ablation"],
                "place_per_channel": ablation["table"]["places"][p.name]["ablation per channel"],
                "of": len(ablation["layers"]),
                "setting": setting_name(config.bits, config.group_size),
            }
        layer["verdict"] = judge(layer, layer_ranks)
        out.append(layer)
    return out


def _feedback_ratio(feedback: Mapping[str, Any]) -> float | None:
    for setting in feedback.get("settings", {}).values():
        ratio = setting["all columns"]["ratio"]
        if ratio is not None:
            return float(ratio["estimate"])
    return None


def _noise(overlap: Mapping[str, Any]) -> dict[str, float] | None:
    """Overlap of the state's leading directions at the first and last step, if it does not exceed chance."""
    ends = [row for row in overlap.get("overlaps", []) if row["between"].startswith("steps")]
    if not ends or any(row["overlap"] > 1.25 * row["chance"] for row in ends):
        return None
    return {"overlap": float(ends[0]["overlap"]), "chance": float(ends[0]["chance"])}


def setting_name(bits: int, group_size: int) -> str:
    """Short name of a rounding: "INT4 g128", "INT4 per channel"."""
    return f"INT{bits} per channel" if group_size == PER_CHANNEL else f"INT{bits} g{group_size}"


def _assemble(
    model: Object, layers: list[Object], data: Object, settings: Object, outcome: _Outcome
) -> Object:
    diagnosis: Object = clean(
        {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            "data": data,
            "settings": settings,
            "layers": layers,
            "summary": [*summary(layers), *returned(outcome.done.get("feedback", {}))],
            "sections": outcome.done,
            "unavailable": outcome.unavailable,
            "estimate": outcome.estimate,
            "seconds": outcome.seconds,
            "versions": versions(),
        }
    )
    return diagnosis


def versions() -> dict[str, str]:
    """Versions of the software that affect the numbers."""
    installed = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    packages = ("loopq", "numpy", "torch", "scipy", "transformers")
    return installed | {name: known for name in packages if (known := version_of(name))}


def clean(value: Any) -> Any:
    """Convert to plain JSON data: arrays to lists, NumPy numbers to Python's, NaN and infinity to None."""
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [clean(v) for v in value]
    if isinstance(value, np.generic):
        return clean(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _estimate_line(estimate: Mapping[str, Any]) -> str:
    total = float(estimate["seconds"])
    text = f"{total:.0f} s" if total < 90 else f"{total / 60:.0f} min"
    parts = sorted(estimate["sections"].items(), key=lambda item: -float(item[1]["seconds"]))[:3]
    most = ", ".join(f"{name} {float(part['seconds']):.0f} s" for name, part in parts)
    return (
        f"diagnosis: about {text} ({most}); {estimate['n_prompt_rollouts']} rollouts of one prompt, "
        f"{float(estimate['hessian_bytes']) / 2**20:.0f} MiB for Hessians"
    )
