"""Options, prompts, tokenizers and templates of `loopq run`, and records, as nobody should give them."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from ..support.looped import save_dense
from .counts import Counts, before
from .files import EVIL, changed_json
from .inputs import SECONDS, WORDS, _run
from .runs import begin, finish

NUMBERS = [
    "0", "-0.0", "1", "2", "3", "-1", "1e-40", "1e-45", "5e-324", "1e-320", "1e308", "1e400", "3.5e38", "nan", "inf",
    "-inf", "1e-7", "0.999999999", "1.0000001", "9" * 23, "9" * 5000, str(2**31), str(2**63), str(2**64 - 1),
    str(2**64), "1.5", "٣", "0x10", "",
]  # fmt: skip
PROMPTS = [
    "", " ", "\n", "The sea", "a" * 600, "\x01\x02", "é" * 20, "\ud800", "5 17 3", "5 999", "255", "256", "9" * 23,
    "9" * 5000, "-5", "1e5", "5,,5", "²", "٣", "18446744073709551616", "1 " * 600, "<eos><pad>", "{{ x }}", "-0",
    EVIL,
]  # fmt: skip
OPTIONS = ("--temperature", "--top-p", "--seed", "--n-steps", "--exit", "--kv", "--n-tokens")
ROUNDED = "--method rtn --group-size 16"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def options(base: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Run models and a checkpoint with random options; every second model has one file changed."""
    counts = Counts()
    plain = base / "plain"
    models = {"of ids": _saved(plain, False), "of texts": _saved(base / "words", True)}
    checkpoint = base / "q"
    (base / "t.jsonl").write_text(json.dumps({"input_ids": list(range(3, 19))}))
    line = f"quantize looped:{plain}[1:3]x2 --out {checkpoint} --calibration {base}/t.jsonl {ROUNDED}"
    assert _run(line.split())[0] == 0
    for number in before(until, range(n_cases)):
        kind = rng.choice(["a checkpoint", *models])
        folder = models.get(kind, checkpoint)
        changed = ""
        if number % 2 and kind in models:
            shutil.rmtree(base / "changed", ignore_errors=True)
            shutil.copytree(folder, folder := base / "changed")
            changed = _changed(folder, rng)
        model = str(folder) if kind == "a checkpoint" else f"looped:{folder}[1:3]x2"
        # One step of few tokens, unless an option says more.
        argv = ["run", model, rng.choice(PROMPTS), "--n-tokens", "2"]
        for option in rng.sample(OPTIONS, rng.randint(0, 3)):
            value = rng.choice([*NUMBERS, *WORDS[:12]])
            # Many steps or tokens are right, and take their time.
            if option not in ("--n-steps", "--n-tokens") or not value.isdecimal() or int(value[:9] or 0) < 9:
                argv += [option, value]
        code, text = _run([a.replace("\0", "") for a in argv])
        bad = code not in (0, 1, 2) or "Traceback" in text or (code and len(text.splitlines()[-1]) > 2000)
        outcome = {0: "text", 1: "refused", 2: "wrong usage"}.get(code, f"exit code {code}")
        counts.add(outcome, f"{argv!r:.400}, {changed}: {code}: {text[-300:]}" if bad else "")
    return counts


def _saved(folder: Path, words: bool) -> Path:
    save_dense(folder)
    if words:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        known = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{chr(c): c - 29 for c in range(32, 127)}}
        tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ).save_pretrained(folder)
    return folder


def _changed(folder: Path, rng: random.Random) -> str:
    """Change one file of a model; what it was."""
    kind = rng.choice(["weight", *FILES])
    if kind == "weight":
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = rng.choice(sorted(tensors))
        tensors[name] *= rng.choice([float("nan"), float("inf"), 1e30, 0.0])
        save_file(tensors, path, metadata={"format": "pt"})
        return f"weight {name}"
    path = folder / kind
    if path.is_file():
        text, _ = changed_json(path.read_text(), rng)
        path.write_bytes(text.encode(errors="surrogatepass"))
    return f"{kind} changed"


def records(base: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Calibrate with one record or text of up to 64 MiB, of which 48 tokens are asked: the memory has a bound."""
    counts = Counts()
    words = _saved(base / "words", True)
    for number in before(until, range(n_cases)):
        size, kind = int(2 ** rng.uniform(16, 26)), list(RECORDS)[number % len(RECORDS)]
        path = base / f"record.{kind.partition(' ')[0]}"
        RECORDS[kind](path, ("The sea was calm. " * (size // 18 + 1))[:size])

        def bound(size: int = size) -> None:
            status = Path("/proc/self/status").read_text().splitlines()
            held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
            resource.setrlimit(resource.RLIMIT_DATA, (held + 8 * size + (1 << 29),) * 2)
            signal.alarm(SECONDS)

        asked = "--n-prompts 2 --seq-len 24 --threads 1"
        line = f"quantize looped:{words}[1:3]x2 --out {base}/q --calibration {path} {ROUNDED} {asked}"
        code, said = finish(begin(line.split(), base / "log", bound)), (base / "log").read_text()
        counts.add(f"{kind}: exit code {code}", f"{kind} of {size} bytes: {said[-300:]}" if code else "")
        shutil.rmtree(base / "q", ignore_errors=True)
        path.unlink()
    return counts


def _table(path: Path, text: str) -> None:
    from pyarrow import array, parquet, table  # lazy: optional

    parquet.write_table(table({"text": array([text] * 9).dictionary_encode()}), path, compression="zstd")


RECORDS: dict[str, Callable[[Path, str], object]] = {
    "jsonl": lambda path, text: path.write_text(json.dumps({"text": text})),
    "jsonl of blanks": lambda path, text: path.write_text(json.dumps({"text": " " * len(text)})),
    "txt": lambda path, text: path.write_text(text),
    "parquet": _table,
}
