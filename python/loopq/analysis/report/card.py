"""The model card of a checkpoint folder: its model, its measurements and how to reproduce it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.analysis.report.markup import markdown
from loopq.analysis.report.style import INK, SERIES, canvas, label, styled
from loopq.errors import ConfigError
from loopq.formats import FORMATS
from loopq.formats.convert import inspect_any
from loopq.formats.hf_folder import CARD, CONFIG, PICTURE, read_config
from loopq.layers.loop_spec import parse_spec
from loopq.storage.files import MAX_SIZE, read_bytes
from loopq.storage.folders import output_file, write_output
from loopq.terminal.table import size
from loopq.terminal.text import visible

#: Its tag and the end of its title, by which a card of loopq's is known again.
_TAG, _TITLE = "loopq", "quantized by loopq"
#: What the picture holds.
_MADE = b"Software\0loopq"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: Folder of the hub's cache.
_CACHED = re.compile(r"[/\\]models--([\w.-]+?)--([\w.-]+)[/\\]snapshots[/\\]")
#: Entries of a card about its licence.
_LICENCE = re.compile(
    r"""^(license|license_name|license_link): *(?:\n *- *)?["']?([\w.:/-]+)["']? *$""", re.MULTILINE
)
#: Files that calibration prompts are read from, by their ending.
_TEXT = re.compile(r"[^,]+\.(txt|jsonl|parquet|npy)")


def write_card(
    folder: Path,
    model: str | None,
    base: Path | None,
    measured: Sequence[Mapping[str, Any]],
    text: Mapping[str, Any],
    words: Sequence[str] = (),
) -> Path:
    """Write README.md into a checkpoint folder, with a picture if chunks were measured, and return its path.

    The card shows the hub id of the full-precision `model`, or a folder's last part. None means that nothing was
    measured. The card then has the checkpoint folder's name, unless config.json has a hub id. The card in the folder
    `base` may name a licence. `measured` are the `Measurement.summary` of full precision and of the checkpoint, `text`
    is `TokenSet.describe` of the prompts with "n_steps" and "n_seeds". `words` of the command line name the model and
    its options, by default `model`.

    Raises
    ------
    ConfigError
        If the folder has a README.md that loopq did not write.
    """
    check_card(folder)
    facts = inspect_any(folder)
    safe, text, measured = markdown(facts), markdown(text), markdown(measured)
    config = read_config(folder)[0] if (folder / CONFIG).is_file() else {}
    origin, loop = _origin(model, base, config)
    name = folder.name if origin is None else f"{origin}{loop}"
    kind = _pipeline(config, measured)
    lines = [*_front(facts, origin, _licence(base), kind), f"# {markdown(name)}, {_TITLE}", ""]
    lines += [*_what(safe), ""]
    if measured:
        lines += [*_table(measured), "", _measured_on(text), ""]
        lines += [line for m in measured if "warning" in m for line in (f"**Warning:** {m['warning']}.", "")]
    if measured and "tokens" in measured[-1]:
        _picture(folder / PICTURE, measured[-1]["tokens"])
        lines += [f"![KL by token]({PICTURE})", ""]
    words = words or [model or "MODEL"]
    lines += [*_made(facts, shlex.join(words), shlex.quote(folder.resolve().name)), ""]
    path = folder / CARD
    return write_output(path, "\n".join(lines).encode(), _TITLE.encode())


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
    text = _read(path)
    _, front, body = text.split("---\n", 2) if text.count("---\n") > 1 else ("", "", "")
    if f"- {_TAG}\n" not in front or not re.search(rf"^# .*, {_TITLE}$", body, re.MULTILINE):
        raise ConfigError(f"{path}: not a card that loopq wrote; move it away, or leave the card out")


def _read(path: Path) -> str:
    """The text of a card of any origin. It is empty if there is none."""
    return read_bytes(path, MAX_SIZE, ConfigError).decode("utf-8", "replace") if path.is_file() else ""


def _origin(model: str | None, base: Path | None, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The hub id of the base model, or else the name of its folder, and the text of its loop.

    Without a model the hub id that config.json names, if any.
    """
    spec = "" if model is None else model
    name = parse_spec(spec)[0]
    loop = spec.removeprefix("looped:").removeprefix(name)
    if _HUB_ID.fullmatch(name) and base is not None and not Path(name).exists():
        return name, loop
    cached = None if base is None else _CACHED.search(f"{base.absolute()}/")
    if cached is not None:
        return f"{cached[1]}/{cached[2]}", loop
    stated = (read_config(base)[0] if base is not None and (base / CONFIG).is_file() else config).get(
        "_name_or_path"
    )
    if isinstance(stated, str) and _HUB_ID.fullmatch(stated):
        return stated, loop
    return (None if model is None else Path(name).resolve().name), loop


def _pipeline(config: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> str:
    """The hub's name of the model's task, by its architecture or by its output."""
    first = next(iter(config.get("architectures") or []), "")
    if str(first).endswith(("ForMaskedLM", "ForPreTraining")):
        return "fill-mask"
    causal = str(first).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    hidden = bool(measured) and measured[0]["output"] == "hidden"
    return "feature-extraction" if not causal and (first or hidden) else "text-generation"


def _front(facts: Mapping[str, Any], origin: str | None, licence: Sequence[str], kind: str) -> list[str]:
    """The entries by which the hub lists a quantized model under its base."""
    bits = sorted({layer["bits"] for layer in facts["layers"]})
    origin = None if origin is None else origin if re.fullmatch(r"[\w./-]+", origin) else json.dumps(origin)
    return [
        "---",
        *([f"base_model: {origin}", "base_model_relation: quantized"] if origin else []),
        *licence,
        f"library_name: {FORMATS.get(facts['format']).library}",
        f"pipeline_tag: {kind}",
        "tags:",
        *(f"- {tag}" for tag in (_TAG, "looped-transformer", *(f"{b}-bit" for b in bits))),
        "---",
        "",
    ]


def _licence(base: Path | None) -> list[str]:
    """The licence in the base model's card, as lines of a card. The hub knows `unknown` too."""
    front = [] if base is None else _read(base / CARD).split("---\n")
    stated = dict(_LICENCE.findall(front[1])) if len(front) > 2 else {}
    return [f"{key}: {value}" for key, value in ({"license": "unknown"} | stated).items()]


def _what(facts: Mapping[str, Any]) -> list[str]:
    layers, settings = facts["layers"], facts["settings"]
    grids: dict[str, int] = {}
    for layer in layers:
        group = "one scale a row" if layer["group_size"] == -1 else f"groups of {layer['group_size']}"
        grid = f"{layer['grid']}, {group}, {layer['scale_dtype']} scales"
        grids[grid] = grids.get(grid, 0) + 1
    packed, whole = size(sum(layer["n_bytes"] for layer in layers)), size(facts["n_bytes"])
    of = f" of system `{settings['system']}`" if settings.get("system") else ""
    return [
        f"A looped transformer{of}: {len(layers)} weights of the loop quantized ({packed}), all tensors {whole}. "
        f"Format: {facts['format']}.",
        "",
        *(f"* {count} weights: {grid}" for grid, count in grids.items()),
        "",
        "```python",
        FORMATS.get(facts["format"]).loads,
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
        with output_file(path, 0, _MADE) as temporary:
            figure.savefig(temporary, format="png", dpi=120, metadata={"Software": "loopq"})


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


def _made(facts: Mapping[str, Any], model: str, folder: str) -> list[str]:
    """The command that makes the checkpoint again, with its settings."""
    settings = facts["settings"]
    if "quantization" not in settings:
        return ["Not quantized by loopq: its settings are not known."]
    text = markdown(settings["calibration"])
    digest = f" (SHA-256 of the tokens {text['sha256'][:16]})" if "sha256" in text else ""
    return [
        "## How it was made",
        "",
        f"Calibrated on {text['n_prompts']} prompts, {text['n_tokens']} tokens of {text['source']}{digest}, "
        f"{markdown(settings['n_steps'])} steps, seed {markdown(settings['seed'])}. The same again, or of another "
        "model, from the folder around this one:",
        "",
        "```sh",
        f"loopq quantize {model} --like {folder} {_prompts(settings['calibration'])} --out NEW",
        "```",
        "",
        f"`quantization` of `loopq inspect {folder} --json`:",
        "",
        "```json",
        json.dumps(settings["quantization"], indent=1, sort_keys=True),
        "```",
    ]


def _prompts(text: Mapping[str, Any]) -> str:
    """Options for the same prompts. TEXT stands for those that no file names."""
    file = _TEXT.match(visible(text["source"], one_line=True))
    embedded = text["source"].startswith("embedded")
    words = [] if embedded else ["--calibration", file[0] if file else "TEXT"]
    words += ["--n-prompts", visible(text["n_prompts"], one_line=True)]
    if text.get("packing") == "windows":
        words += ["--seq-len", str(text["n_tokens"] // text["n_prompts"])]
    return shlex.join(words)
