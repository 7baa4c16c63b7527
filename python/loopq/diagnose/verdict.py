"""What the numbers of a layer mean, in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# A layer is called blind where step 0 sees under a twentieth of its input and later steps, each on its own,
# at least twice as much; the blind layers of Li, Table 18 lie at 0.02-1.5 % and gain 3x and more.
BLIND_RATIO = 0.05
LATE_GAIN = 2.0
DOMINANT_SHARE = 0.9


def judge(layer: Mapping[str, Any], ranks: Mapping[str, Any] | None) -> dict[str, Any]:
    """Judge one layer.

    Parameters
    ----------
    layer : mapping
        Facts of the layer: `name`, `role`, `exposed`, `treatment`, `reason`, and where measured `ablation`
        (`changed`, `place`, `of`, `setting`, `output_error_last`), `feedback_ratio`, and `noise` (`overlap`,
        `chance`) where the state at step 0 overlaps with the last one's no more than chance.
    ranks : mapping or None
        `rank.layer_ranks` of its input; None where it was not observed.

    Returns
    -------
    dict
        `blind`, `dominated`, `exposed`: flags, None where unknown; `text`: sentences.
    """
    texts = []
    blind = dominated = None
    if ranks is None:
        texts.append(f"Its input was not surveyed{_because(layer)}.")
    else:
        blind, dominated, seen = _seen(ranks)
        texts.append(seen)
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


def _seen(ranks: Mapping[str, Any]) -> tuple[bool, bool, str]:
    first, dim = int(ranks["first"]["rank"]), int(ranks["dim"])
    late = [int(s["rank"]) for s in ranks["per_step"][1:]]
    share = ranks["step0_trace_share"]
    seen = f"Sees {first:,} of {dim:,} directions at step 0"
    if not late:
        return False, False, seen + "; it is used at one step only, so one-step calibration is all there is."
    typical = int(np.median(late))
    blind = first < BLIND_RATIO * dim and typical >= LATE_GAIN * max(first, 1)
    # A dominant step only hides something where the later steps have more to show.
    dominated = (
        share is not None
        and share > DOMINANT_SHARE
        and ranks["all"]["rank"] < 0.5 * max(late)
        and typical >= LATE_GAIN * max(first, 1)
    )
    if blind:
        text = f"{seen}, {typical:,} at a typical later step; one-step calibration will mislead the solver."
    elif typical >= LATE_GAIN * max(first, 1):
        text = (
            f"{seen} and {typical:,} at a typical later step; one-step calibration misses part of its input."
        )
    elif typical * LATE_GAIN <= first:
        text = f"{seen}, more than the {typical:,} of a typical later step: another kind of input."
    else:
        text = f"{seen} and {typical:,} at a typical later step; step 0 already shows most of its input."
    if dominated:
        text += (
            f" Step 0 holds {100 * share:.1f} % of the energy and drowns the later steps in the sum: "
            "weigh the steps."
        )
    return blind, dominated, text


def _noise(noise: Mapping[str, float]) -> str:
    return (
        f"At step 0 its state half is noise: it shares {100 * noise['overlap']:.1f} % of its leading directions with "
        f"the last step, and chance alone gives {100 * noise['chance']:.1f} %."
    )


def _exposed(layer: Mapping[str, Any]) -> str:
    text = "No identity path leads around it: its error is fed back into the loop whole"
    ratio = layer.get("feedback_ratio")
    if ratio is None:
        return text + "."
    if ratio >= 1.05:
        return f"{text}, which makes the final error {ratio:.2f} times that of one step."
    return f"{text}; here that adds little ({ratio:.2f} times the error of one step)."


def _cost(ablation: Mapping[str, Any]) -> str:
    place = f"place {ablation['place']} of {ablation['of']}"
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
    """Sentences about the whole model, from judged layers."""
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
            f"most damaging when rounded alone: {grouped['name']} at {grouped['ablation']['setting']}, "
            f"{whole['name']} with one scale per row"
        )
    return out
