"""Files of every format, as checksums for refactoring: the same checkpoint, and dumps of the exact model.

All weights are whole numbers over 64, so that nothing depends on the machine. `python -m tests.golden.files` writes
the record `files.json` anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

import benches.zoo.models
import loopq
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.data import TokenSet
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.errors import LoopqError
from loopq.formats import FORMATS as REGISTRY
from loopq.formats.convert import read_any, write_as
from loopq.layers.grids import LEVELS
from loopq.models.systems.generic import Generic
from loopq.settings.execution import Execution
from tests.golden import quantized
from tests.support import vendors
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
#: Wide enough for the blocks of 256 weights of some GGUF types.
WIDE = {"hidden_size": 256, "intermediate_size": 512}
#: Format, and what of the grid it needs.
FORMATS = {
    "native-4": ("native", {}),
    "native-3": ("native", {"bits": 3, "group_size": 48}),
    "native-asymmetric": ("native", {"symmetric": False}),
    "compressed-tensors": ("compressed-tensors", {}),
    "compressed-tensors-asymmetric": ("compressed-tensors", {"symmetric": False}),
    "gptq": ("gptq", {"group_size": 32}),
    "gptq_v2": ("gptq_v2", {"group_size": 32, "symmetric": False}),
    "gguf-4": ("gguf", {"group_size": 32}),
    "gguf-8": ("gguf", {"group_size": 32, "bits": 8}),
    **{f"native-uneven-{bits}": ("native", {"bits": bits, "levels": "uneven"}) for bits in (2, 3, 4)},
    "native-fitted": ("native", {"levels": "fitted", "wide": True}),
    "native-nvfp4": ("native", {"group_size": 16, "levels": "nvfp4"}),
    "native-mxfp4": ("native", {"group_size": 32, "levels": "mxfp4"}),
    "compressed-tensors-nvfp4": ("compressed-tensors", {"group_size": 16, "levels": "nvfp4"}),
    "compressed-tensors-mxfp4": ("compressed-tensors", {"group_size": 32, "levels": "mxfp4"}),
    "modelopt": ("modelopt", {"group_size": 16, "levels": "nvfp4"}),
}
#: Levels that a GGUF file has a type for.
TYPES = tuple(name for name in LEVELS.names() if name not in ("uneven", "fitted", "nvfp4"))
FORMATS |= {
    f"{kind}-{name}": (kind, {"levels": name, "wide": True}) for name in TYPES for kind in ("native", "gguf")
}


def of_folder(folder):
    """SHA-256 of each file below a folder, by its path there."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def exact(model):
    """Give a model whole numbers over 64 as weights."""
    random = np.random.RandomState(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(random.randint(-60, 61, tuple(parameter.shape)) / 64.0))
    return model


def checkpoint(*, wide=False, **grid):
    """A Nanbeige-shaped model rounded to the nearest code, its norms and its embedding as they are."""
    sizes = WIDE | {"head_dim": 64} if wide else {}
    small = SMALL | ({"n_embd": 256, "intermediate_size": 512, "head_dim": 64} if wide else {})
    model = exact(benches.zoo.models.build(small).eval())
    size = 32 if grid.get("levels") == "mxfp4" else 128 if wide else 64
    given = {"bits": 4, "group_size": size, **grid}
    return models.checkpoint_of(model, CONFIG | sizes, **given)


def written(name, folder):
    """Write one case below a folder and give its checksums."""
    format_name, grid = FORMATS[name]
    stored = checkpoint(**grid)
    if not REGISTRY.get(format_name).one_file:
        write_as(folder / "q", stored, format_name)
        return of_folder(folder / "q")
    write_as(folder / "n", stored, "native")
    (folder / "q").mkdir()
    write_as(folder / "q" / "model.gguf", read_any(folder / "n"), format_name)
    return of_folder(folder / "q")


def exported(name, folder):
    """Quantize a folder of a published class, write it in every format that takes it, and give the checksums."""
    build, settings = FOLDERS[name]
    exact(build()).save_pretrained(folder / "m")
    source = f"looped:{folder / 'm'}[1:3]x3" if name == "looped" else folder / "m"
    ids = np.random.RandomState(3).randint(3, 60, (2, 12))
    digests = {}
    for levels in ("even", "q5_0"):
        given = {"group_size": 32} if levels == "even" else {}
        loopq.quantize(
            source, ids, out=folder / "q", method="rtn", levels=levels, threads=1, **given, **settings
        )
        for format_name, _ in REGISTRY:
            out = folder / ("x.gguf" if REGISTRY.get(format_name).one_file else "x")
            with contextlib.suppress(LoopqError):
                # Not by `export`: a forced file says why no engine reads it.
                REGISTRY.get(format_name).refuse_checkpoint()
                write_as(out, read_any(folder / "q"), format_name)
                read = {out.name: of_folder(folder)[out.name]} if out.is_file() else of_folder(out)
                # The weights alone: an index may change, and losses in reports depend on the machine.
                weights = {
                    file: sha for file, sha in read.items() if file.endswith((".gguf", ".safetensors"))
                }
                digests |= {f"{levels} {format_name} {file}": sha for file, sha in weights.items()}
            shutil.rmtree(out, ignore_errors=True)
            out.unlink(missing_ok=True)
        shutil.rmtree(folder / "q")
    return digests


def _llama():
    return models.tiny_llama(num_hidden_layers=4)[0]


SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
#: Folders of published classes, and what `quantize` takes for them.
FOLDERS = {
    "dory": (partial(vendors.dory, **SIZES), {}),
    "inkling": (
        partial(vendors.inkling, **(SIZES | {"moe_intermediate_size": 32})),
        {"exclude": ("*controllers*",)},
    ),
    "hrm_text": (lambda: models.tiny_hrm()[0], {}),
    "looped": (_llama, {}),
}


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
    **{f"folder-{name}": partial(exported, name) for name in FOLDERS},
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
