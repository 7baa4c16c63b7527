"""A model of full size, from checkpoint to INT4 checkpoint: `python -m benches.full_size MODEL --code FOLDER`.

The weights are random, written to disk in the class that the model is published with. FOLDER holds that code
(a checkout or the .py files of the repository); HRM-Text-1B and Llama-1B-looped are classes of transformers
and need none. Then the commands of a user run, each in a separate process: `quantize`, `export` and
`evaluate`, and on request `collect` and `solve`. Each command reports wall time, bytes read, and two memory
peaks: with mapped files, and without them (memory that the system cannot reclaim). For `quantize` the table
adds its estimate and the cost of its parts in a separate process: bare rollouts of the prompts, and Hessians
and solves of layers of those shapes from random rows. The weights of a model are mapped, so that a machine
with less memory than the model reads them again in each loop.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benches.python.record import write
from loopq.models.blank import blank
from loopq.run.config import PRESETS

_OURO = {
    "config": "configuration_ouro.OuroConfig", "model": "modeling_ouro.OuroForCausalLM", "hidden_size": 2048,
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
    "vocab_size": 49152, "total_ut_steps": 4, "early_exit_threshold": 1.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_scaling": None, "rope_theta": 1e6, "max_position_embeddings": 4096, "attention_dropout": 0.0,
}  # fmt: skip
#: Settings that a configuration class takes as an attribute only.
LATER = {"num_key_value_heads"}
#: Settings of each model; "config" and "model" name classes of its code, without them transformers has the class.
MODELS: dict[str, dict[str, Any]] = {
    "Huginn-3.5B": {
        "config": "raven_config_minimal.RavenConfig", "model": "raven_modeling_minimal.RavenForCausalLM",
        "n_embd": 5280, "n_heads": 55, "intermediate_size": 17920, "vocab_size": 65536, "mean_recurrence": 32,
    },
    "R-Llama-1.4B": {
        "config": "raven_config_minimal.RavenConfig", "model": "raven_modeling_minimal_llama.RavenForCausalLM",
        "tie_embeddings": False, "qk_bias": False, "n_embd": 2048, "n_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "mean_recurrence": 32,
        "n_layers_in_prelude": 4, "n_layers_in_recurrent_block": 6, "n_layers_in_coda": 4, "rope_scaling": None,
        "rope_theta": 5e5, "max_position_embeddings": 4096,
    },
    "Ouro-1.4B": {**_OURO, "num_hidden_layers": 24},
    "Ouro-2.6B": {**_OURO, "num_hidden_layers": 48},
    "HRM-Text-1B": {"model_type": "hrm_text"},
    "Llama-1B-looped": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "looped_layers": [4, 12, 2],
        "tie_word_embeddings": True,
    },
    # Two blocks with the shapes of Ouro-1.4B, for benches.cost.
    "Ouro-pair": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 49152, "looped_layers": [0, 2, 4],
        "max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
}  # fmt: skip
#: Name of the row of what the parts of `quantize` take alone.
PARTS = "parts of quantize alone"
DEFAULT = "default"
#: Numbers of a file.
_SHARD = 1 << 30
#: The estimate that `loopq quantize` prints.
_SAID = re.compile(r"about ([0-9.]+) (KiB|MiB|GiB) at most.*? and ([0-9.]+) (s|min|h)")
_UNITS = {"KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


def make(name: str, code: Path | None, folder: Path) -> None:
    """Write the model's folder: its code, configuration, and random weights in bfloat16, file by file."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config, kind = _classes(dict(MODELS[name]), code, folder)
    model = blank(lambda: kind(config) if code else kind.from_config(config), memory=False)
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    shards: list[dict[str, torch.Size]] = [{}]
    for parameter, value in model.named_parameters():
        if sum(s.numel() for s in shards[-1].values()) + value.numel() > _SHARD:
            shards.append({})
        shards[-1][parameter] = value.shape
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05d}.safetensors"
        tensors = {n: _drawn(s, generator) for n, s in shard.items()}
        if not number:
            tensors |= {n: b.clone() for n, b in model.state_dict().items() if not b.is_meta}
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def _classes(settings: dict[str, Any], code: Path | None, folder: Path) -> tuple[Any, Any]:
    """A configuration and the class of the model."""
    import transformers

    classes = {part: settings.pop(part) for part in ("config", "model") if part in settings}
    if not classes:
        return transformers.AutoConfig.for_model(**settings), transformers.AutoModelForCausalLM
    files = {value.split(".")[0] + ".py" for value in classes.values()}
    if code is None or not all((code / file).is_file() for file in files):
        raise SystemExit(f"--code names no folder with {', '.join(sorted(files))}")
    for file in files:
        shutil.copy(code / file, folder)
    load = transformers.dynamic_module_utils.get_class_from_dynamic_module
    config = load(classes["config"], str(folder))(**{k: v for k, v in settings.items() if k not in LATER})
    for key in LATER & set(settings):
        setattr(config, key, settings[key])
    config.auto_map = {"AutoConfig": classes["config"], "AutoModelForCausalLM": classes["model"]}
    return config, load(classes["model"], str(folder))


def _drawn(shape: Any, generator: Any) -> Any:
    """Normal numbers scaled so that products keep the size of their input; ones for norms."""
    import torch

    if len(shape) < 2:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)


def run(command: list[str]) -> dict[str, Any]:
    """Run a command; give its seconds, peaks in GiB, GiB read from disk, and what it announced."""
    print("$ loopq", *command, flush=True)
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-m", "loopq", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peaks = {"RssAnon": 0, "VmHWM": 0}
    read = 0
    while process.poll() is None:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            for key in peaks:
                match = re.search(rf"{key}:\s+(\d+)", status)
                peaks[key] = max(peaks[key], int(match[1]) if match else 0)
            read = int(Path(f"/proc/{process.pid}/io").read_text().split("read_bytes: ")[1].split()[0])
        time.sleep(0.2)
    assert process.stdout is not None
    output = process.stdout.read()
    print(output, flush=True)
    if process.returncode:
        raise SystemExit(f"loopq {' '.join(command)}: exit code {process.returncode}")
    said, after = _SAID.search(output), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "command": command[0],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, 1),
        "peak_gib": round(peaks["RssAnon"] / 2**20, 2),
        "peak_with_mapped_files_gib": round(peaks["VmHWM"] / 2**20, 2),
        "read_gib": round(read / 2**30, 2),
        **(
            {"said_gib": float(said[1]) * _UNITS[said[2]], "said_seconds": float(said[3]) * _UNITS[said[4]]}
            if said
            else {}
        ),
    }


def alone(model: Path, prompts: Any, preset: str, n_steps: int | None, remote: bool) -> dict[str, Any]:
    """Seconds of the prompts' bare rollouts, and of the Hessians and solves of random rows, shape by shape."""
    import torch

    from loopq.calibrate.data import from_ids
    from loopq.models.load import load_model
    from loopq.run.config import QuantConfig
    from loopq.run.model_source import ModelSource

    system = load_model(model, trust_remote_code=remote).system
    tokens = from_ids(prompts)
    source = ModelSource.of(system, tokens, n_steps=n_steps)
    tasks = source.plan(QuantConfig.of(preset=preset)).tasks
    depth = source.job.selection.n_steps
    seconds = {"rollouts": 0.0, "hessians": 0.0, "solves": 0.0}
    with torch.no_grad():
        for batch in tokens.batches(source.execution.batch_size, 0):
            with _timed(seconds, "rollouts"):
                system.rollout(batch, depth)
    groups = {t.input_group: t for t in tasks}
    known: dict[tuple[int, ...], dict[str, float]] = {}
    total = dict.fromkeys(("hessians", "solves"), 0.0)
    for task in tasks:
        shape = (task.parameter.out_features, task.parameter.in_features, len(task.steps))
        if shape not in known:
            known[shape] = _layer_alone(task, tokens.n_tokens)
            print(f"alone: {task.name}, {shape[0]} x {shape[1]}: {known[shape]}", flush=True)
        total["solves"] += known[shape]["solves"]
        if groups[task.input_group] is task:
            total["hessians"] += known[shape]["hessians"]
    return {k: round(v, 1) for k, v in (seconds | total).items()}


def _layer_alone(task: Any, n_tokens: int) -> dict[str, float]:
    """Seconds of one layer's Hessian and solve, from random rows."""
    import loopq._native as native
    from loopq.quantizers import Problem

    rng = np.random.default_rng(0)
    rows, columns = task.parameter.out_features, task.parameter.in_features
    x = rng.standard_normal((n_tokens * len(task.steps), columns), dtype=np.float32)
    weight = rng.standard_normal((rows, columns), dtype=np.float32)
    stored = (x.view(np.uint32) >> 16).astype(np.uint16)
    seconds: dict[str, float] = {}
    with _timed(seconds, "hessians"):
        acc = native.HessianAccumulator(columns, [0], per_step=False)
        acc.update(0, stored)
        acc.finish()
        hessian = acc.matrix()
    del acc
    with _timed(seconds, "solves"):
        task.config.method.quantize(Problem(task.name, weight, hessian, task.config.grid))
    return {k: round(v, 2) for k, v in seconds.items()}


@contextlib.contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[what] = seconds.get(what, 0.0) + time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--code", type=Path, help="folder of the published code")
    parser.add_argument("--work", type=Path, required=True, help="room for the model and its results")
    parser.add_argument("--n-prompts", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--n-steps", type=int, help="the model's own when absent")
    parser.add_argument("--memory", help="of `quantize`")
    parser.add_argument("--preset", default="fast", choices=[DEFAULT, *PRESETS])
    parser.add_argument("--dump", action="store_true", help="also collect and solve")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()

    model, results_at = args.work / args.model, args.work / f"made-{args.preset}"
    if not (model / "model.safetensors.index.json").is_file():
        shutil.rmtree(model, ignore_errors=True)
        make(args.model, args.code, model)
    settings = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(args).items()
        if k not in ("work", "record", "code")
    }
    # Hours of work: what was measured with the same settings is not measured again.
    saved = results_at / "measured.json"
    measured = json.loads(saved.read_text()) if saved.is_file() else {}
    results: list[dict[str, Any]] = measured["results"] if measured.get("settings") == settings else []
    if not results:
        shutil.rmtree(results_at, ignore_errors=True)
        results_at.mkdir()
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts = np.random.default_rng(0).integers(0, min(vocabulary, 30_000), (args.n_prompts, args.seq_len))
    np.save(results_at / "prompts.npy", prompts)
    on_model = ["--trust-remote-code"] if args.code else []
    on_model += ["--n-steps", str(args.n_steps)] if args.n_steps else []
    text, limit = (
        ["--calibration", str(results_at / "prompts.npy")],
        ["--memory", args.memory] if args.memory else [],
    )
    preset = [] if args.preset == DEFAULT else ["--preset", args.preset]
    commands = [["quantize", str(model), *on_model, *text, *limit, "--out", str(results_at / "Q"), *preset]]
    if args.dump:
        commands += [
            ["collect", str(model), *on_model, *text, "--out", str(results_at / "D"), "--hessian"],
            ["solve", str(results_at / "D"), "--out", str(results_at / "S")],
        ]
    commands += [
        [
            "export",
            str(results_at / "Q"),
            "--format",
            "compressed-tensors",
            "--ragged",
            "split",
            "--out",
            str(results_at / "CT"),
        ],
        [
            "evaluate",
            str(model),
            str(results_at / "Q"),
            *on_model,
            "--text",
            str(results_at / "prompts.npy"),
            "--n-prompts",
            "2",
        ],
    ]

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        saved.write_text(json.dumps({"settings": settings, "results": results}))

    done = [r["command"] for r in results]
    for command in commands:
        if command[0] not in done:
            if "--out" in command:
                # Of a run that was stopped: going on from there would be measured as less.
                out = Path(command[command.index("--out") + 1])
                for left in (out, *results_at.glob(f".{out.name}.*")):
                    shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
            keep(run(command))
    # Random rows have no gradients, so the parts of a loop metric are not timed alone.
    if PARTS not in done and args.preset in ("fast", "paper"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            parts = pool.apply(alone, (model, prompts, args.preset, args.n_steps, bool(args.code)))
        keep({"command": PARTS, "seconds": round(sum(parts.values()), 1), **parts})
    seconds = {r["command"]: r["seconds"] for r in results}
    if PARTS in seconds:
        print(json.dumps(results[-1]), f"quantize over it: {seconds['quantize'] / seconds[PARTS]:.2f}")
    write(args.record, results, **settings)


if __name__ == "__main__":
    main()
