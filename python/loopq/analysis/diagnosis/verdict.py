"""Explain the measurements of a layer in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loopq.analysis.diagnosis.blindness import ALL, ONE, RTN, model_ratio
from loopq.storage.schema import Object

# Step 0 is said to miss directions when a typical later step has this many times as many.
LATE_GAIN = 2.0
DOMINANT_SHARE = 0.9


def judge(layer: Mapping[str, Any], ranks: Mapping[str, Any] | None) -> Object:
    """Judge one layer.

    Parameters
    ----------
    layer : mapping
        The layer's `name`, `role`, `exposed`, `treatment`, `reason` and `routed_in`. Measured layers may have `solved`
        (`blindness.solved_losses`), `ablation` and `feedback_ratio`. `ablation` holds `changed`, `place`, `of`,
        `setting` and `output_error_last`. `noise` (`overlap`, `chance`) exists where the states at step 0 and the last
        step overlap by no more than chance.
    ranks : mapping or None
        `rank.layer_ranks` of its input. None where it was not observed.

    Returns
    -------
    dict
        The flags `blind`, `dominated` and `exposed` are None where unknown. A layer is `blind` if solving it from step
        0 loses more over the trajectory than rounding it. `text` holds the sentences.
    """
    texts = []
    blind = dominated = None
    if ranks is None:
        texts.append(f"Its input was not measured{_because(layer)}.")
    else:
        dominated, text = _coverage(ranks)
        texts += [_few(ranks), text] if layer.get("routed_in") else [text]
    if layer.get("solved"):
        blind, text = _solved(layer["solved"])
        texts.append(text)
    elif ranks is not None and not ranks["per_step"][1:]:
        blind = False
    if layer.get("noise"):
        texts.append(_noise(layer["noise"]))
    if layer["exposed"]:
        texts.append(_exposed(layer))
    if layer.get("ablation"):
        texts.append(_cost(layer["ablation"]))
    return {
        "blind": blind,
        "dominated": dominated,
        "exposed": bool(layer["exposed"]),
        "text": " ".join(texts),
    }


def _because(layer: Mapping[str, Any]) -> str:
    return f" ({layer['reason']})" if layer.get("reason") else ""


def _few(ranks: Mapping[str, Any]) -> str:
    """Describe the number of an expert's rows, which limits its ranks."""
    rows = [int(s["n_rows"]) for s in ranks["per_step"]]
    few = ", fewer than it has inputs" * (sum(rows) < ranks["dim"])
    return f"An expert: {min(rows):,} rows at least and {np.median(rows):,g} typically at a step{few}."


def _solved(losses: Mapping[str, float]) -> tuple[bool, str]:
    """Whether one-step calibration is worse than rounding over the trajectory, and a sentence."""
    one, rtn, whole = (losses[name] for name in (ONE, RTN, ALL))
    against = one / rtn if rtn > 0 else 1.0
    more = f" and {one / whole:.2f} times as much as solved from all steps" if whole > 0 else ""
    text = f"Solved from step 0 it loses {against:.2f} times as much over the trajectory as rounded{more}"
    if one > rtn:
        return True, f"{text}: one-step calibration misleads the solver."
    return False, f"{text}."


def _coverage(ranks: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether step 0 dominates the sum of all steps, and a sentence on its coverage."""
    first, dim = int(ranks["first"]["rank"]), int(ranks["dim"])
    late = [int(s["rank"]) for s in ranks["per_step"][1:]]
    share = ranks["step0_trace_share"]
    start = f"Its input has {first:,} of {dim:,} directions at step 0"
    if not late:
        return False, start + "; it runs at one step only, so one-step calibration covers it."
    typical = int(np.median(late))
    # A dominant step hides directions only where later steps have a higher rank than the sum.
    dominated = (
        share is not None
        and share > DOMINANT_SHARE
        and ranks["all"]["rank"] < 0.5 * max(late)
        and typical >= LATE_GAIN * max(first, 1)
    )
    if typical >= LATE_GAIN * max(first, 1):
        text = f"{start} and {typical:,} at a typical later step: one-step calibration misses part of them."
    elif typical * LATE_GAIN <= first:
        text = f"{start}, more than the {typical:,} of a typical later step: step 0 is a different kind of input."
    else:
        text = f"{start} and {typical:,} at a typical later step: step 0 already covers most of them."
    if dominated:
        text += (
            f" Step 0 holds {100 * share:.1f} % of the energy and hides the later steps in the sum: choose other "
            "step weights than the plain sum."
        )
    return dominated, text


def _noise(noise: Mapping[str, float]) -> str:
    return (
        f"At step 0 its state half is noise: {100 * noise['overlap']:.1f} % of its leading directions are shared with "
        f"the last step, where chance alone gives {100 * noise['chance']:.1f} %."
    )


def _exposed(layer: Mapping[str, Any]) -> str:
    text = "No identity path leads around it: its error enters the next state in full"
    ratio = layer.get("feedback_ratio")
    if ratio is None:
        return text + "."
    if ratio >= 1.05:
        return f"{text}, and feedback raises the final error to {ratio:.2f} times that of one step."
    return f"{text}; feedback adds little here (final error {ratio:.2f} times that of one step)."


def _cost(ablation: Mapping[str, Any]) -> str:
    place = f"ranked {ablation['place']} of {ablation['of']}"
    if ablation.get("changed") is not None:
        return (
            f"Rounding it alone to {ablation['setting']} changes {100 * ablation['changed']:.2f} % of the "
            f"predictions ({place})."
        )
    return (
        f"Rounding it alone to {ablation['setting']} moves the output by "
        f"{100 * ablation['output_error_last']:.2g} % ({place})."
    )


def _one_step(losses: Sequence[Mapping[str, float] | None]) -> list[str]:
    """Describe the effect of one-step calibration on the whole model."""
    against, over = (model_ratio(losses, ONE, other) for other in (RTN, ALL))
    if against is None or over is None:
        return []
    word = "worse" if against > 1 else "better"
    return [
        f"one-step calibration is {word} than rounding: {against:.2f} times its loss over the trajectory, {over:.2f} "
        "times that of calibration on all steps (geometric means over layers)"
    ]


def returned(feedback: Mapping[str, Any]) -> list[str]:
    """Describe, from the first setting of the section `feedback`, whether errors of steps add up."""
    for name, curves in feedback.get("settings", {}).items():
        curve = curves["all columns"]
        if curve["ratio"] is not None and curve["returned"] is not None:
            word = "adds to" if curve["returned"] > 0 else "cancels part of"
            return [
                f"{name}, an error that returns {word} the new one (cosine {curve['returned']:+.2f}): the final "
                f"error is {curve['ratio']['estimate']:.2f} times that without feedback"
            ]
    return []


def summary(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about the whole model, from its judged layers."""
    out = []
    for flag, what in (
        ("blind", "calibration-blind: solved from step 0, worse than rounded over the trajectory"),
        ("dominated", "dominated by step 0 in the summed Hessian"),
        ("exposed", "feedback-exposed (no identity path)"),
    ):
        if all(layer["verdict"][flag] is None for layer in layers):
            continue  # Not measured.
        names = [layer["name"] for layer in layers if layer["verdict"][flag]]
        out.append(
            f"{len(names)} of {len(layers)} layers {what}" + (f": {', '.join(names[:6])}" if names else "")
        )
    out += _one_step([layer.get("solved") for layer in layers])
    ranked = [layer for layer in layers if layer.get("ablation")]
    if ranked:
        grouped = min(ranked, key=lambda layer: layer["ablation"]["place"])
        whole = min(ranked, key=lambda layer: layer["ablation"]["place_per_channel"])
        out.append(
            f"largest damage when rounded alone: {grouped['name']} at {grouped['ablation']['setting']}, "
            f"{whole['name']} with one scale per row"
        )
    return out
