"""Importance for llama.cpp's own quantizer: the diagonal of what an error costs in the loop. docs/formats/gguf.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loopq.calibrate.dump import Dump
from loopq.errors import DumpError
from loopq.formats.gguf import Shape
from loopq.lazy import require
from loopq.run.plan import steps_of
from loopq.run.source import loop_metric
from loopq.storage.files import check_new, replacing


def write_imatrix(source: str | Path, out: str | Path, steps: str = "all") -> list[str]:
    """Write a weight for every input of every layer, as llama-quantize reads them.

    Parameters
    ----------
    source : path
        Calibration dump (`loopq collect`) of a Llama-shaped loop; with its loop metric if that was collected.
    out : path
        New file.
    steps : str
        Steps that count, as of `loopq.settings.steps.parse_steps`.

    Returns
    -------
    list of str
        Lines to print.

    Raises
    ------
    CheckpointError
        llama.cpp has no such architecture.
    DumpError
        No layer was observed, or a loop metric is not over these steps.

    Notes
    -----
    ``in_sum2[j] = sum over steps t and rows r of X_t[r, j]^2 = diag(H)[j]`` and ``counts`` the rows: a weight that the
    loop uses at every step is rounded by what all steps feed it. Where the dump holds a layer's loop metric it is
    ``diag(S)`` in the place of ``diag(H)``, `S` of `LoopMetric.combined`, brought to the same sum.
    """
    gguf = require("gguf")
    check_new(Path(out))
    dump = Dump(Path(source))
    manifest = dump.manifest
    shape = Shape.read(dump.side_files())
    layers = [p for p in manifest.parameters if p.name in manifest.input_groups]
    if not layers:
        raise DumpError(f"{source}: no layer was observed")
    measured = {m.parameter for m in manifest.metrics}
    with replacing(Path(out)) as temporary:
        writer = gguf.GGUFWriter(temporary, shape.architecture)
        writer.add_type("imatrix")
        text = manifest.calibration
        writer.add_array("imatrix.datasets", [str(text["source"])])
        writer.add_uint32("imatrix.chunk_count", text["n_prompts"])
        writer.add_uint32("imatrix.chunk_size", text["n_tokens"] // text["n_prompts"])
        for parameter in layers:
            input_group = manifest.input_groups[parameter.name]
            chosen = list(steps_of(parameter, steps, manifest.n_steps))
            hessians = dump.accumulator(input_group, chosen)
            summed = chosen if hessians.per_step else None
            sums = hessians.diagonal(summed)
            if parameter.name in measured:
                metric = loop_metric(dump, parameter.name, chosen)
                ends = np.diagonal(metric.combined(np.asarray(hessians.matrix(summed), dtype=np.float64)))
                # Inputs that are always zero have no weight by either.
                sums = ends * (sums.sum() / (ends.sum() or 1.0))
            rows = sum(hessians.n_rows(t) for t in chosen)
            for name in shape.tensors(parameter.name):
                writer.add_tensor(f"{name}.in_sum2", sums[None].astype(np.float32))
                writer.add_tensor(f"{name}.counts", np.array([[rows]], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    by = f"; {len(measured)} by the loop metric" if measured else ""
    return [f"{out}: importance of {len(layers)} layers, steps {steps}{by}"]
