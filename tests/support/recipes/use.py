"""Use every recipe: run as a program in a copy of the repository that has their files, with a folder and the names of
parts. Prints what it found."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

import loopq
from loopq.cli import main, parser
from loopq.commands.options import quant_config
from loopq.formats.convert import read_any

IDS = [[1, 2, 3], [4, 5, 6]]
LAYER = "madeup_core.weight"


def printed(*words: str) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(list(words))
    return out.getvalue()


def refused(what: Any, *given: Any, **more: Any) -> str:
    """Return the message of a refusal."""
    try:
        what(*given, **more)
    except loopq.LoopqError as error:
        return str(error)
    return ""


def listed() -> dict[str, bool]:
    """Where the names are listed."""
    text = printed("quantize", "--help-all")
    lines = {line.split()[0]: line for line in text.replace("\n  --", "\n\n--").split("\n\n") if line.split()}
    return {
        "level": "`madeup`" in lines["--levels"],
        "method": "madeup" in lines["--method"],
        "option": "loudness" in lines["--set"],
        "system": "madeup" in printed("check"),
        "format": "madeup" in printed("export", "--help"),
    }


def by_system(folder: Path) -> dict[str, Any]:
    """The system with the quantizer, the grid and the format."""
    model = torch.nn.Module()
    model.madeup_core = torch.nn.Linear(16, 16, bias=False)

    def quantized(*config: Any, **settings: Any) -> Any:
        return loopq.quantize(model, IDS, *config, group_size=4, **settings)

    plain, loud = quantized(method="madeup"), quantized(method="madeup", loudness=2.0)
    override = loopq.Override("*", {"method": "madeup", "loudness": 2.0})
    # No engine of loopq's table opens the format.
    forced = {"write": "madeup", "force": True}
    quantized(levels="madeup", bits=2, method="gptq-cd", metric="inputs", out=folder / "q.madeup", **forced)
    command = [
        "quantize",
        "m",
        "--out",
        "o",
        "--method",
        "madeup",
        "--set",
        "loudness=2",
        "--levels",
        "madeup",
    ]
    asked = quant_config(parser().parse_args([*command, "--bits", "2"])).layer
    return {
        "system": plain.settings["system"],
        "done": loud.layers[LAYER].report["method_done"],
        "ratio": (loud.layers[LAYER].scales / plain.layers[LAYER].scales).ravel().tolist(),
        "override": quantized(loopq.QuantConfig.of(override)).layers[LAYER].same_as(loud.layers[LAYER]),
        "asked": [asked.method.to_json(), asked.grid.levels],
        "written": printed("inspect", str(folder / "q.madeup")).split("\n")[0],
        "unread": refused(quantized, loudness=2.0),
        "bits": refused(quantized, levels="madeup", bits=3),
        "format": refused(quantized, bits=8, out=folder / "x.madeup", write="madeup"),
    }


def by_files(folder: Path) -> dict[str, Any]:
    """The grid in loopq's own checkpoint, in GGUF and in a format that does not take it."""
    # It imports transformers, which takes longer than all else here.
    from tests.support.interop import models

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    models.tiny_llama(**sizes)[0].save_pretrained(folder / "m")
    result = loopq.quantize(
        f"looped:{folder / 'm'}[0:2]x2",
        IDS,
        out=folder / "q",
        method="rtn",
        levels="madeup",
        bits=2,
        group_size=256,
    )
    layer = next(iter(result.layers.values()))
    again = read_any(folder / "q").layers[layer.name]
    printed("export", str(folder / "q"), "--format", "gguf", "--out", str(folder / "q.gguf"))
    loopq.export(folder / "q", folder / "e.madeup", "madeup", force=True, repeats="2")
    return {
        "stored": {key: again.settings()[key] for key in ("kind", "tint", "bits")},
        "same": again.same_as(layer) and again.grid == layer.grid,
        "values": sorted(set((again.dequantize() / again.scales.repeat(256, 1)[:, :256]).ravel().tolist())),
        "inspected": "MADEUP" in printed("inspect", str(folder / "q")),
        "gguf": "TQ2_0" in printed("inspect", str(folder / "q.gguf")),
        "exported": len(printed("inspect", str(folder / "e.madeup")).split("\n")) - 1
        == 2 * len(result.layers),
        "refused": refused(loopq.export, folder / "q", folder / "g", "gptq"),
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    parts = {"listed": listed, "by_system": lambda: by_system(place), "by_files": lambda: by_files(place)}
    print(json.dumps({name: parts[name]() for name in sys.argv[2:]}))
