"""The model card of a checkpoint folder: its model, its measurements and how to reproduce it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.errors import ConfigError
from loopq.formats import FORMATS
from loopq.formats.convert import inspect_any
from loopq.formats.hf_folder import CARD, PICTURE
from loopq.report.style import INK, SERIES, canvas, label, styled
from loopq.storage.files import remove_leftovers, write_text
from loopq.terminal.table import size

#: Its tag and the end of its title, by which a card of loopq's is known again.
_TAG, _TITLE = "loopq", "quantized by loopq"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def write_card(
    folder: Path,
    model: str | None,
    base: Path | None,
    measured: Sequence[Mapping[str, Any]],
    text: Mapping[str, Any],
) -> Path:
    """Write README.md into a checkpoint folder, with a picture if chunks were measured.

    Parameters
    ----------
    folder : Path
        Checkpoint of any format that loopq reads.
    model : str or None
        The user's name of the full-precision model. The card shows a hub id, or a folder's last part. None means that
        nothing was measured. The card then has the checkpoint folder's name.
    base : Path, optional
        The model's folder. Its card may name a licence.
    measured : sequence of mapping
        `Measurement.summary` of full precision and of the checkpoint, with "kl_95" if available. May be empty.
    text : mapping
        `TokenSet.describe` of the prompts, with "n_steps" and "n_seeds".

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ConfigError
        If the folder has a README.md that loopq did not write.
    """
    check_card(folder)
    for name in (CARD, PICTURE):
        remove_leftovers(folder, name)
    found = inspect_any(folder)
    name = (
        folder.name
        if model is None
        else model
        if _HUB_ID.fullmatch(model) and base is not None and not Path(model).exists()
        else Path(model).name
    )
    lines = [*_front(found, name, _licence(base)), f"# {name}, {_TITLE}", ""]
    lines += [*_what(found), ""]
    if measured:
        lines += [*_table(measured), "", _measured_on(text), ""]
    if measured and "tokens" in measured[-1]:
        _picture(folder / PICTURE, measured[-1]["tokens"])
        lines += [f"![KL by token]({PICTURE})", ""]
    lines += [*_made(found, name if model is not None else "MODEL"), ""]
    path = folder / CARD
    return write_text(path, "\n".join(lines))


def check_card(folder: Path) -> None:
    """Reject a folder with a README.md that loopq did not write.

    Raises
    ------
    ConfigError
        If there is one, because it would be lost.
    """
    path = folder / CARD
    if not path.exists():
        return
    text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    _, front, body = text.split("---\n", 2) if text.count("---\n") > 1 else ("", "", "")
    if f"- {_TAG}\n" not in front or not re.search(rf"^# .*, {_TITLE}$", body, re.MULTILINE):
        raise ConfigError(f"{path}: not a card that loopq wrote; move it away, or leave the card out")


def _front(found: Mapping[str, Any], name: str, licence: str | None) -> list[str]:
    bits = sorted({layer["bits"] for layer in found["layers"]})
    named = "/" in name
    return [
        "---",
        *([f"base_model: {name}", "base_model_relation: quantized"] if named else []),
        *([f"license: {licence}"] if licence else []),
        "tags:",
        *(f"- {tag}" for tag in (_TAG, "looped-transformer", *(f"{b}-bit" for b in bits))),
        "---",
        "",
    ]


def _licence(base: Path | None) -> str | None:
    """The licence in the base model's card."""
    card = None if base is None else base / CARD
    if card is None or not card.is_file():
        return None
    front = card.read_text("utf-8", errors="replace").split("---")
    stated = re.search(r"^license: *([\w.-]+) *$", front[1], re.MULTILINE) if len(front) > 2 else None
    return stated[1] if stated else None


def _what(found: Mapping[str, Any]) -> list[str]:
    layers, settings = found["layers"], found["settings"]
    grids: dict[str, int] = {}
    for layer in layers:
        group = "one scale a row" if layer["group_size"] == -1 else f"groups of {layer['group_size']}"
        grid = f"{layer['grid']}, {group}, {layer['scale_dtype']} scales"
        grids[grid] = grids.get(grid, 0) + 1
    packed, whole = size(sum(layer["n_bytes"] for layer in layers)), size(found["n_bytes"])
    of = f" of system `{settings['system']}`" if settings.get("system") else ""
    return [
        f"A looped transformer{of}: {len(layers)} weights of the loop quantized ({packed}), all tensors {whole}. "
        f"Format: {found['format']}.",
        "",
        *(f"* {count} weights: {grid}" for grid, count in grids.items()),
        "",
        "```python",
        FORMATS.get(found["format"]).loads,
        "```",
    ]


def _table(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    hidden = measured[0]["output"] == "hidden"
    heads = (
        ["weights", "squared relative error", "cosine"]
        if hidden
        else ["weights", "KL (nats)", "agreement", "perplexity"]
    )
    each = "tokens" in measured[-1]
    heads += ["median KL", "99 % KL"] * each
    rows = []
    for m in measured:
        ends = m.get("kl_95")
        kl = f"{m['kl']:.3g}" + (f" [{ends[0]:.3g}, {ends[1]:.3g}]" if ends else "")
        cells = (
            [f"{m['agreement']:.5f}"]
            if hidden
            else [f"{100 * m['agreement']:.2f} %", f"{m['perplexity']:.4f}"]
        )
        if each:
            cells += [f"{m['tokens']['quantiles'][i]:.3g}" for i in (50, 99)]
        rows.append([m["name"], kl, *cells, size(m["n_bytes"])])
    return [f"| {' | '.join(row)} |" for row in ([*heads, "bytes"], ["---"] * (len(heads) + 1), *rows)]


def _picture(path: Path, tokens: Mapping[str, Any]) -> None:
    """Share of the tokens with a larger KL."""
    with styled("card"):
        figure, axes = canvas(6.4, 3.2)
        kl = [max(v, 1e-7) for v in tokens["quantiles"]]
        axes.plot(kl, [100 - i for i in range(len(kl))], color=SERIES[0][0])
        for i, name in ((50, "median"), (99, "99 %")):
            axes.plot(kl[i], 100 - i, "o", color=SERIES[0][0])
            axes.annotate(f"{name}: {kl[i]:.2g}", (kl[i], 100 - i), (6, 6), textcoords="offset points")
        axes.axvline(tokens["kl"], color=INK, linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        label(axes, "KL of a token to full precision [nats], dotted: mean", "tokens with a larger KL [%]")
        figure.savefig(path, dpi=120, metadata={"Software": None})


def _measured_on(text: Mapping[str, Any]) -> str:
    scored = (
        " Chunks as of llama.cpp's `llama-perplexity --kl-divergence`: the second half of each is scored."
        if text["packing"] == "chunks"
        else ""
    )
    return (
        f"Measured by `loopq evaluate` on {text['n_prompts']} prompts, {text['n_tokens']} tokens of {text['source']}, "
        f"at {text['n_steps']} steps, {text['n_seeds']} initial states of each, the same for both. KL to full "
        "precision, mean over tokens, with a 95 % bootstrap interval over prompts; agreement: same most probable token."
        + scored
    )


def _made(found: Mapping[str, Any], name: str) -> list[str]:
    settings = found["settings"]
    if "quantization" not in settings:
        return ["Not quantized by loopq: its settings are not known."]
    text = settings["calibration"]
    return [
        "## How it was made",
        "",
        f"Calibrated on {text['n_prompts']} prompts, {text['n_tokens']} tokens of {text['source']} (SHA-256 of the "
        f"tokens {text['sha256'][:16]}), {settings['n_steps']} steps, seed {settings['seed']}. The same again, or of "
        "another model:",
        "",
        "```sh",
        f"loopq quantize {name} --like DIR --calibration TEXT --out NEW",
        "```",
        "",
        "`quantization` of `loopq inspect DIR --json`:",
        "",
        "```json",
        json.dumps(settings["quantization"], indent=1, sort_keys=True),
        "```",
    ]
