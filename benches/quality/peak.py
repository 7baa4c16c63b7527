"""Peak memory of a part of a process, and peak memory and CPU seconds of commands beside what they announce.

`python -m benches.quality.peak MODEL ...` runs the commands one after the other, each in a separate process,
and prints a table. All numbers are above what the process has used once everything is imported. `--random`
makes a model of 104 million random weights first. `--settings` runs `quantize` with these settings only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from loopq.terminal.table import render

PROCESS = Path("/proc/self")
TEXT = "--n-prompts 4 --seq-len 64 --batch-size 2 --threads 1 {calibration}"
#: Commands in the order in which they need each other's output.
COMMANDS = {
    "quantize --preset fast": f"quantize {{model}} --out {{room}}/fast --preset fast {TEXT}",
    "quantize": f"quantize {{model}} --out {{room}}/q {TEXT}",
    "quantize --preset best": f"quantize {{model}} --out {{room}}/best --preset best {TEXT}",
    "collect": f"collect {{model}} --out {{room}}/rows {TEXT}",
    "collect --hessian": f"collect {{model}} --out {{room}}/sums --hessian {TEXT}",
    "solve (rows)": "solve {room}/rows --out {room}/s1 --threads 1",
    "solve (Hessians)": "solve {room}/sums --out {room}/s2 --threads 1",
    "evaluate": "evaluate {model} {room}/q --n-prompts 4 --seq-len 64 --batch-size 2 {text}",
    "export": "export {room}/q --out {room}/e --format compressed-tensors",
    "run": "run {room}/q 5,6,7 --n-tokens 8",
}
UNITS = {"s": 1, "min": 60, "h": 3600}
#: Imports of a process before its baseline, and the code that reports both numbers.
CHILD = """
import json, sys, time, warnings
import torch, transformers, safetensors.torch
from transformers import LlamaForCausalLM
import loopq.api, loopq.cli, loopq.run.route, loopq.systems, loopq.gradients.collect_metrics, loopq.evaluation.compare
from benches.quality.peak import Peak
torch.set_num_threads(1)
peak, began = Peak(), time.process_time()
code = loopq.cli.main(json.loads(sys.argv[1]))
used = time.process_time() - began
print(json.dumps({"code": code, "before": peak.before, "peak": peak.mib(), "seconds": used}))
"""


class Peak:
    """Most resident memory since `restart`, above what was resident when this was made (Linux only), in MiB."""

    def __init__(self) -> None:
        self.restart()
        self.before = _resident("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far; what has been freed goes back to the system first."""
        ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text("5")  # proc(5): resets the peak of the resident set

    def mib(self) -> float:
        """The peak, in MiB."""
        return _resident("VmHWM") - self.before


def _resident(name: str) -> float:
    """A size in the kernel's status of this process, in MiB."""
    lines = (PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measured(line: str) -> tuple[float | None, float, float | None, float]:
    """Run a command; return MiB and seconds that it announced and that it took, above its imports."""
    argv = [sys.executable, "-c", CHILD, json.dumps(line.split())]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"code": done.returncode}
    if answer["code"]:
        raise SystemExit(f"loopq {line}: code {answer['code']}: {done.stderr[-500:]}")
    said = re.search(r"about (\d+) MiB at most(?:.* and ([\d.]+) (s|min|h)\b)?", done.stderr)
    mib = int(said[1]) - answer["before"] if said else None
    seconds = float(said[2]) * UNITS[said[3]] if said and said[2] else None
    return mib, answer["peak"], seconds, answer["seconds"]


def random_model(out: Path) -> None:
    """A Llama of three layers and 104 million weights; the one in the middle is looped."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=3,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(out)
    np.save(out / "ids.npy", np.random.default_rng(0).integers(0, 32_000, size=(8, 64)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benches.quality.peak", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument(
        "--text", metavar="FILE", help="calibrate and evaluate on this, for a tokenizer of a model's own"
    )
    parser.add_argument(
        "--register", metavar="FILE", help="of loopq, for the classes of models in benches/zoo"
    )
    parser.add_argument("--random", action="store_true", help="a model of 104 million random weights too")
    parser.add_argument(
        "--settings", action="append", help="of quantize, with all its other defaults; repeatable"
    )
    args = parser.parse_args()
    before = f"--register {args.register} " if args.register else ""
    rows = []
    lines = {
        f"quantize {s}": f"quantize {{model}} --out {{room}}/q{i} --threads 1 {s}"
        for i, s in enumerate(args.settings or ())
    }
    with tempfile.TemporaryDirectory() as folder:
        models = list(args.models)
        if args.random:
            random_model(Path(folder) / "random")
            models.append(f"looped:{folder}/random[1:2]x2")
        for number, model in enumerate(models):
            (room := Path(folder) / str(number)).mkdir()
            text = f"{folder}/random/ids.npy" if number == len(args.models) else args.text
            given = {kind: f"--{kind} {text}" if text else "" for kind in ("calibration", "text")}
            for name, line in (lines or COMMANDS).items():
                said, took, announced, seconds = measured(
                    before + line.format(model=model, room=room, **given)
                )
                ratios = said and f"{said / took:.2f}", announced and f"{announced / seconds:.2f}"
                numbers = said and f"{said:.0f}", f"{took:.0f}", ratios[0], announced and f"{announced:.0f}"
                rows.append((Path(model).name, name, *numbers, f"{seconds:.0f}", ratios[1]))
                print(*rows[-1], file=sys.stderr, flush=True)
    heads = "announced MiB", "peak MiB", "ratio", "announced s", "CPU s", "ratio"
    print(render(("model", "command", *heads), rows))


if __name__ == "__main__":
    main()
