"""What the measurements of a layer mean, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# A layer is called calibration-blind where the rank at step 0 is under a twentieth of the input width and the
# rank at a typical later step is at least twice as high; the blind layers of Li, Table 18 have 0.02-1.5 % and
# gain 3x and more.
BLIND_RATIO = 0.05
LATE_GAIN = 2.0
DOMINANT_SHARE = 0.9


def judge(layer: Mapping[str, Any], ranks: Mapping[str, Any] | None) -> dict[str, Any]:
    """Judge one layer.

    Parameters
    ----------
    layer : mapping
        The layer's `name`, `role`, `exposed`, `treatment`, `reason`, and where measured `ablation` (`changed`,
        `place`, `of`, `setting`, `output_error_last`), `feedback_ratio`, and `noise` (`overlap`, `chance`) where
        the state at step 0 overlaps with that of the last step no more than by chance.
    ranks : mapping or None
        `rank.layer_ranks` of its input; None where that was not observed.

    Returns
    -------
    dict
        `blind`, `dominated`, `exposed`: flags, None where unknown; `text`: sentences.
    """
    texts = []
    blind = dominated = None
    if ranks is None:
        texts.append(f"Its input was not measured{_because(layer)}.")
    else:
        blind, dominated, text = _coverage(ranks)
        texts.append(text)
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


def _coverage(ranks: Mapping[str, Any]) -> tuple[bool, bool, str]:
    """Whether step 0 covers too little of the input, whether it dominates the sum, and a sentence."""
    first, dim = int(ranks["first"]["rank"]), int(ranks["dim"])
    late = [int(s["rank"]) for s in ranks["per_step"][1:]]
    share = ranks["step0_trace_share"]
    start = f"Its input has {first:,} of {dim:,} directions at step 0"
    if not late:
        return False, False, start + "; it runs at one step only, so one-step calibration covers it."
    typical = int(np.median(late))
    blind = first < BLIND_RATIO * dim and typical >= LATE_GAIN * max(first, 1)
    # A dominant step hides something only where later steps have a higher rank than the sum.
    dominated = (
        share is not None
        and share > DOMINANT_SHARE
        and ranks["all"]["rank"] < 0.5 * max(late)
        and typical >= LATE_GAIN * max(first, 1)
    )
    if blind:
        text = (
            f"{start} and {typical:,} at a typical later step: one-step calibration will mislead the solver."
        )
    elif typical >= LATE_GAIN * max(first, 1):
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
    return blind, dominated, text


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


def summary(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about the whole model, from its judged layers."""
    out = []
    for flag, what in (
        ("blind", "calibration-blind at step 0"),
        ("dominated", "dominated by step 0 in the summed Hessian"),
        ("exposed", "feedback-exposed (no identity path)"),
    ):
        names = [layer["name"] for layer in layers if layer["verdict"][flag]]
        out.append(
            f"{len(names)} of {len(layers)} layers {what}" + (f": {', '.join(names[:6])}" if names else "")
        )
    ranked = [layer for layer in layers if layer.get("ablation")]
    if ranked:
        grouped = min(ranked, key=lambda layer: layer["ablation"]["place"])
        whole = min(ranked, key=lambda layer: layer["ablation"]["place_per_channel"])
        out.append(
            f"largest damage when rounded alone: {grouped['name']} at {grouped['ablation']['setting']}, "
            f"{whole['name']} with one scale per row"
        )
    return out
