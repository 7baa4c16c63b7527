"""Files of every format, as checksums for refactoring: the same checkpoint, and dumps of the exact model.

All weights are whole numbers over 64, so that nothing depends on the machine. `python -m tests.golden.files` writes
the record `files.json` anew.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

import benches.zoo.models
import loopq
from loopq.calibrate.collect import Collection, collect_hessians, collect_rows
from loopq.calibrate.data import TokenSet
from loopq.calibrate.select import select
from loopq.formats import FORMATS as REGISTRY
from loopq.formats.convert import read_any, write_as
from loopq.settings.execution import Execution
from loopq.systems.generic import Generic
from tests.golden import quantized
from tests.support.interop import models

RECORD = Path(__file__).parent / "files.json"
CONFIG = {
    "architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige", "vocab_size": 96, "hidden_size": 128,
    "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_loops": 3,
}  # fmt: skip
SMALL = {
    "model_type": "loopq-zoo-nanbeige", "vocab_size": 96, "n_embd": 128, "intermediate_size": 192, "n_layers": 1,
    "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "block_size": 64, "num_loops": 3,
}  # fmt: skip
#: Format, and what of the grid it needs.
FORMATS = {
    "native-4": ("native", {}),
    "native-3": ("native", {"bits": 3, "group_size": 48}),
    "native-asymmetric": ("native", {"symmetric": False}),
    "compressed-tensors": ("compressed-tensors", {}),
    "compressed-tensors-asymmetric": ("compressed-tensors", {"symmetric": False}),
    "gptq": ("gptq", {"group_size": 32}),
    "gptq_v2": ("gptq_v2", {"group_size": 32, "symmetric": False}),
    "marlin": ("marlin", {"group_size": 128, "leave": ("lm_head",)}),
    "gguf-4": ("gguf", {"group_size": 32}),
    "gguf-8": ("gguf", {"group_size": 32, "bits": 8}),
}


def of_folder(folder):
    """SHA-256 of each file below a folder, by its path there."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def checkpoint(**grid):
    """A Nanbeige-shaped model rounded to the nearest code, its norms and its embedding as they are."""
    model = benches.zoo.models.build(SMALL).eval()
    random = np.random.RandomState(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(random.randint(-60, 61, tuple(parameter.shape)) / 64.0))
    return models.checkpoint_of(model, CONFIG, **{"bits": 4, "group_size": 64, **grid})


def written(name, folder):
    """Write one case below a folder and give its checksums."""
    format_name, grid = FORMATS[name]
    found = checkpoint(**grid)
    if not REGISTRY.get(format_name).one_file:
        write_as(folder / "q", found, format_name)
        return of_folder(folder / "q")
    write_as(folder / "n", found, "native")
    (folder / "q").mkdir()
    write_as(folder / "q" / "model.gguf", read_any(folder / "n"), format_name)
    return of_folder(folder / "q")


def dumped(kind, folder):
    """Collect a dump of the exact model, solve it, and give the checksums of both."""
    system, tokens = (
        Generic(quantized.ExactLoop().eval()),
        TokenSet(tuple(np.asarray(p) for p in quantized.ids()), "made", "prompts"),
    )
    execution = Execution(batch_size=5, threads=1)
    selection = select(system, tokens)
    job = Collection(system, tokens, selection, execution, {})
    if kind == "rows":
        collect_rows(job, folder / "dump", rows_dtype=None, shard_batches=2)
    else:
        collect_hessians(job, folder / "dump", steps=range(quantized.STEPS), per_step=kind == "per-step")
    loopq.solve(folder / "dump", out=folder / "q", threads=1, bits=3, **quantized.G)
    return of_folder(folder)


CASES = {
    **{name: partial(written, name) for name in FORMATS},
    **{f"dump-{kind}": partial(dumped, kind) for kind in ("rows", "hessian", "per-step")},
}


def main():
    """Write the record."""
    record = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            record[name] = case(Path(folder))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
