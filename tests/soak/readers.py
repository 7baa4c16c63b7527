"""Changes to every kind of file that a user brings: prompts, task items, vocabularies, configs, sources,
dumps and checkpoints.

Each is read, or refused in one line that an error of loopq holds, called from Python as scripts do. Sums are not made
right here, as `sealed` does.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import loopq
from loopq.calibrate.read import Served, read_tokens
from loopq.errors import LoopqError, model_code
from loopq.formats import FORMATS
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import inspect_any, write_as
from loopq.formats.gguf.vocabulary import _given
from loopq.formats.imatrix import Entry
from loopq.models.load import encode_bytes, load_model
from loopq.paper.items import TASKS, read_items

from ..support.interop import models
from .counts import Counts, before
from .files import changed_json, dumps, replace
from .inputs import _Late, limited

#: Memory that a case may ask for beyond what there is before: an array of a hostile size is refused by the system then.
MEMORY = 4 << 30
Read = Callable[[Path], object]
ITEMS: dict[str, list[dict[str, Any]]] = {
    "lambada": [{"text": "He said that the sea"}, {"text": "so be it"}],
    "arc_easy": [{"query": "Question: Which", "choices": ["one", "two"], "gold": 0}] * 2,
    "hellaswag": [{"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["a", "b"], "label": "1"}],
    "gsm8k": [{"question": f"{n} + {n}?", "answer": f"It is #### {2 * n}"} for n in range(9)],
}


def prompts(base: Path) -> dict[str, Read]:
    """Prompts in every kind of file."""
    served = Served(encode_bytes)
    (base / "a.txt").write_text("hello world, hello é")
    lines = ({"text": "abc"}, {"input_ids": [7, 8]}, {"question": "a", "answer": "b"})
    (base / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    np.save(base / "c.npy", np.arange(12).reshape(3, 4))
    with contextlib.suppress(ImportError):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": ["abc", "defg"]}), base / "d.parquet")
    return {path.name: lambda path: read_tokens(path, served, 4, None) for path in sorted(base.iterdir())}


def items(base: Path) -> dict[str, Read]:
    """The file of each task."""
    readings: dict[str, Read] = {}
    for name, records in ITEMS.items():
        for file in TASKS[name].files:
            (base / file).parent.mkdir(parents=True, exist_ok=True)
            (base / file).write_text("\n".join(map(json.dumps, records)))
            readings[file] = lambda path, name=name: read_items(name, base)
    (base / "wikitext2").mkdir()
    (base / "wikitext2" / "wiki.test.raw").write_text(" = A = \n It was . \n = B = \n So be it . \n")
    return readings | {"wikitext2/wiki.test.raw": lambda path: read_items("wikitext", base)}


def vocabularies(base: Path) -> dict[str, Read]:
    """A vocabulary that an exported model is to get."""
    import gguf

    path = base / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(16)])
    writer.add_token_scores([0.5] * 16)
    writer.add_bos_token_id(1)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    return {"vocabulary.gguf": lambda path: _given(path, None)}


def gguf_files(base: Path) -> dict[str, Read]:
    """A model for llama.cpp, and importance."""
    whole = _small()
    write_as(base / "model.gguf", whole, "gguf")
    entry = Entry("model.layers.0.mlp.down_proj.weight", np.ones(32), 8, False)
    text = {"source": "made", "n_prompts": 2, "n_tokens": 8}
    observed = SimpleNamespace(
        side_files=whole.side_files, calibration=text, entries=lambda steps: iter([entry])
    )
    FORMATS.get("imatrix").write(base / "importance.gguf", observed)
    return dict.fromkeys(("model.gguf", "importance.gguf"), inspect_any)


def _llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    return models.tiny_llama(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1)


def _small() -> Checkpoint:
    model, config = _llama()
    return models.checkpoint_of(model, config, bits=4, group_size=32)


def _opened(path: Path) -> object:
    loaded = load_model(f"looped:{path.parent}[0:1]x2")
    with torch.no_grad(), model_code("a rollout"):
        return loaded.model(torch.tensor([[1, 2, 3, 4]]), use_cache=False)


def configs(base: Path) -> dict[str, Read]:
    """A folder that is opened as a model."""
    _llama()[0].save_pretrained(base)
    return dict.fromkeys(("config.json", "generation_config.json", "model.safetensors"), _opened)


def sources(base: Path) -> dict[str, Read]:
    """A model that another tool quantized."""
    write_as(base / "q", _small(), "compressed-tensors")
    return dict.fromkeys(("q/config.json", "q/model.safetensors"), _opened)


def checkpoints(base: Path) -> dict[str, Read]:
    """A checkpoint of loopq."""
    _llama()[0].save_pretrained(base / "plain")
    loaded = load_model(f"looped:{base / 'plain'}[0:1]x2")
    loopq.quantize(loaded, [[1, 2, 3, 4]], out=base / "q", method="rtn", group_size=16, threads=1)
    files = sorted(p for p in (base / "q").iterdir() if p.suffix in (".json", ".safetensors", ".jsonl"))
    return {str(path.relative_to(base)): lambda path: loopq.load(path.parent) for path in files}


def _dumps(kind: str) -> Callable[[Path], dict[str, Read]]:
    def make(base: Path) -> dict[str, Read]:
        target = next(target for target in dumps(base) if target.name == kind)
        out = base / "solved"

        def solved(path: Path) -> object:
            shutil.rmtree(out, ignore_errors=True)
            return target.facts(target.folder, out)

        return {f"{kind}/{file}": solved for file in target.files()}

    return make


KINDS: dict[str, Callable[[Path], dict[str, Read]]] = {
    "prompts": prompts, "items": items, "vocabularies": vocabularies, "gguf": gguf_files, "configs": configs,
    "sources": sources, "checkpoints": checkpoints, "rows": _dumps("rows"),
    "Hessians": _dumps("hessian"),
}  # fmt: skip


def changed(content: bytes, name: str, rng: random.Random) -> bytes:
    """One change of a file: of its JSON where it is one, or of its bytes."""
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.8:
        lines = content.decode().split("\n") if name.endswith(".jsonl") else [content.decode()]
        number = rng.randrange(len(lines))
        with contextlib.suppress(ValueError):
            lines[number] = changed_json(lines[number], rng)[0]
        return "\n".join(lines).encode(errors="surrogatepass")
    altered = bytearray(content)
    kind = rng.choice(["flip", "flip", "flip", "number", "cut", "more", "empty"])
    at = rng.randrange(len(altered)) if rng.random() < 0.5 else rng.randrange(min(len(altered), 256))
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 8])):
            altered[(at + rng.randrange(64)) % len(altered)] ^= 1 << rng.randrange(8)
    elif kind == "number":
        altered[at : at + 8] = rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
    elif kind == "cut":
        del altered[at:]
    else:
        altered = bytearray() if kind == "empty" else altered + rng.choice([b"\0", b"\n{", b"x" * 100])
    return bytes(altered)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Let the process have so much memory more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _outcome(read: Read, path: Path) -> str:
    try:
        with limited(60), contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(), _bounded():
            warnings.simplefilter("ignore")
            read(path)
    except LoopqError as error:
        return "refused" if "\n" not in str(error) else f"more than a line: {str(error)[:300]!r}"
    except _Late:
        return "takes more than a minute"
    except Exception as error:  # noqa: BLE001  # what is looked for
        return f"{type(error).__name__}: {error}"[:300]
    return "read"


def readers(base: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Change one file, read it, and put it back; so many cases for each reader."""
    counts = Counts()
    there: dict[str, list[tuple[Path, bytes, Read]]] = {}
    for kind, make in KINDS.items():
        (base / kind).mkdir()
        files = [(base / kind / name, read) for name, read in make(base / kind).items()]
        there[kind] = [(path, path.read_bytes(), read) for path, read in files]
        for path, _, read in there[kind]:
            assert (outcome := _outcome(read, path)) == "read", f"{path}: {outcome}"
    for number, kind in before(until, itertools.product(range(n_cases), KINDS)):
        path, whole, read = there[kind][number % len(there[kind])]
        replace(path, changed(whole, path.name, rng))
        result = _outcome(read, path)
        replace(path, whole)
        wrong = "" if result in ("read", "refused") else f"case {number}, {path.relative_to(base)}: {result}"
        counts.add(f"{kind}: {result.partition(':')[0]}", wrong)
    return counts
