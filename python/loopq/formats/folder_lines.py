"""What `loopq inspect` prints about a quantized folder of another tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loopq.terminal.table import render, size


def folder_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return facts of `QuantizedFolder.facts` as lines: a table of the layers, sizes, and the writing tool."""
    rows = [
        (
            layer["name"],
            "x".join(map(str, layer["shape"])),
            layer["grid"],
            layer["group_size"] if layer["group_size"] != -1 else "row",
            size(layer["n_bytes"]),
            f"{layer['bits_per_weight']:.3f}",
        )
        for layer in facts["layers"]
    ]
    plain = {k: v for k, v in facts["quantization_config"].items() if isinstance(v, str | int | float | bool)}
    origin = "written by another tool: no run report, true shapes as far as the file tells them"
    if facts["exported_by_loopq"] is not None:
        ragged = f", ragged groups: {facts['ragged']}" if facts["ragged"] else ""
        origin = (
            f"exported by loopq {facts['exported_by_loopq']}{ragged}; converting back gives the same bytes"
        )
    return [
        *render(("layer", "shape", "grid", "group", "bytes", "bits a weight"), rows).splitlines(),
        f"format {facts['format']}, {len(facts['dense'])} dense tensors; {size(facts['n_bytes_files'])} on disk, "
        f"{size(facts['n_bytes'])} as a native checkpoint",
        origin,
        "config.json: " + ", ".join(f"{key} {value}" for key, value in plain.items()),
        *([f"forced: {facts['forced']}"] if facts["forced"] else []),
    ]
