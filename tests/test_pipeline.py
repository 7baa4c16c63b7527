"""The main job end to end on a tiny model: the same bytes by every way there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import loopq
from loopq.api import evaluate, weights_of
from loopq.calibrate.collect import Collection, HessianSet, collect_hessians, collect_rows
from loopq.calibrate.dump import Dump, merge
from loopq.calibrate.select import select
from loopq.checkpoint import native as store
from loopq.checkpoint.files import RawTensor, read_tensors, write_tensors
from loopq.config import Override, QuantConfig, preset
from loopq.errors import CheckpointError, ConfigError, DumpError, NonFiniteError
from loopq.evaluate.compare import compare, replaced
from loopq.jobs.run import Run
from loopq.quantizers import sequential
from loopq.systems.load import load_model
from loopq.tune import metric as module

from .checkpoint.made import reseal

SETTINGS = {"bits": 3, "group_size": 20}


def digest(folder):
    """Names and SHA-256 of all files of a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def job_of(loaded, tokens, **kwargs):
    side = {p.name: p.read_bytes() for p in loaded.config_files}
    return Collection(loaded.system, tokens, select(loaded.system, tokens), side_files=side, **kwargs)


class Kill(Exception):
    """Stands for a kill in the middle."""


class Killer:
    """Progress that stops the work at the n-th unit."""

    def __init__(self, at):
        self.left = at

    def start(self, label, total, unit):
        pass

    def advance(self, n=1):
        self.left -= n
        if self.left < 0:
            raise Kill

    def stop(self):
        pass

    def note(self, text):
        pass


@pytest.fixture
def loaded(tiny_folder):
    return load_model(tiny_folder)


@pytest.fixture
def plain(loaded, tokens, tmp_path):
    out = tmp_path / "plain"
    loopq.quantize(loaded, tokens, out=out, batch_size=3, **SETTINGS)
    return out


def test_checkpoint_holds_what_was_solved(loaded, tokens, tmp_path, plain):
    result = loopq.quantize(loaded, tokens, batch_size=3, **SETTINGS)
    again = store.read(plain)
    assert list(result.layers) == [p.name for p in loaded.system.shared_parameters(3)]
    for name, layer in result.layers.items():
        assert layer.same_as(again.layers[name])
        assert again.layers[name].report == json.loads(json.dumps(layer.report))
    assert again.settings["n_steps"] == 3
    assert again.settings["quantization"]["steps"] == "all"


def test_solve_from_a_dump_gives_the_same_bytes(loaded, tokens, tmp_path, plain):
    for shards in (1, 2, 7):
        dump = tmp_path / f"dump-{shards}"
        collect_rows(job_of(loaded, tokens, batch_size=3), dump, shard_batches=shards)
        for threads in (1, 2):
            out = tmp_path / f"solved-{shards}-{threads}"
            loopq.solve(dump, out=out, threads=threads, **SETTINGS)
            assert digest(out) == digest(plain)


@pytest.mark.parametrize("weights", ["balanced", "alpha=1/4", "loss"])
def test_a_dump_of_rows_knows_each_step_apart(loaded, tokens, tmp_path, weights):
    settings = SETTINGS | {"step_weights": weights}
    loopq.quantize(loaded, tokens, out=tmp_path / "plain", batch_size=3, **settings)
    collect_rows(job_of(loaded, tokens, batch_size=3), tmp_path / "dump")
    loopq.solve(tmp_path / "dump", out=tmp_path / "solved", threads=1, **settings)
    assert digest(tmp_path / "solved") == digest(tmp_path / "plain")
    collect_hessians(job_of(loaded, tokens, batch_size=3), tmp_path / "summed")
    with pytest.raises(ConfigError, match="only their sum was collected"):
        loopq.solve(tmp_path / "summed", **settings)


def test_solve_from_hessians_gives_the_same_bytes(loaded, tokens, tmp_path, plain):
    for per_step in (False, True):
        dump = tmp_path / f"hessians-{per_step}"
        collect_hessians(job_of(loaded, tokens, batch_size=3), dump, per_step=per_step)
        loopq.solve(dump, out=tmp_path / f"out-{per_step}", **SETTINGS)
        assert digest(tmp_path / f"out-{per_step}") == digest(plain)


def test_memory_limit_means_more_passes_and_the_same_bytes(loaded, tokens, tmp_path, plain):
    out = tmp_path / "limited"
    loopq.quantize(loaded, tokens, out=out, batch_size=3, memory=40_000, threads=1, **SETTINGS)
    assert digest(out) == digest(plain)
    with pytest.raises(ConfigError, match="its Hessian alone"):
        loopq.quantize(loaded, tokens, batch_size=3, memory=1000, **SETTINGS)


@pytest.mark.parametrize(("at", "rollouts"), [(0, 4), (4, 3), (9, 1), (11, 1), (14, 1)])
def test_quantize_goes_on_after_a_kill(loaded, tokens, tmp_path, plain, monkeypatch, at, rollouts):
    monkeypatch.setattr(
        HessianSet.run_pass, "__kwdefaults__", {**HessianSet.run_pass.__kwdefaults__, "every": 0.0}
    )
    out = tmp_path / "killed"
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=out, batch_size=3, progress=Killer(at), **SETTINGS)
    assert not out.exists()
    seen = []
    monkeypatch.setattr(type(loaded.system), "rollout", counting(type(loaded.system).rollout, seen))
    loopq.quantize(loaded, tokens, out=out, batch_size=3, **SETTINGS)
    assert digest(out) == digest(plain)
    assert not list(tmp_path.glob(".killed*"))
    # The probe, and those of the four batches that no part on disk covers.
    assert len(seen) == rollouts


def test_layers_of_another_solve_are_not_taken_for_those_of_this_one(loaded, tokens, tmp_path, plain):
    """As a kill leaves them that falls between a layer's tensors and its journal."""
    out = tmp_path / "killed"
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=out, batch_size=3, progress=Killer(12), **SETTINGS)
    journal = min((tmp_path / ".killed.work").glob("layers/*/*.json"))
    tensors = journal.with_suffix(".safetensors")
    kept = read_tensors(tensors)
    name = next(n for n in kept if n.endswith("weight_packed"))
    kept[name] = RawTensor.of(np.zeros_like(kept[name].array()))
    write_tensors(tensors, kept)
    loopq.quantize(loaded, tokens, out=out, batch_size=3, **SETTINGS)
    assert digest(out) == digest(plain)


BEST = {"preset": "best", "bits": 3, "group_size": 16, "batch_size": 3, "threads": 1}


# Ten prompts collected, two rounds of forty gradients, nine layers; kept in memory, one round.
@pytest.mark.parametrize(
    ("kept", "at", "prompts"),
    [(0, 9, 20), (0, 26, 16), (0, 49, 10), (0, 75, 4), (0, 91, 0), (1 << 30, 30, 10), (1 << 30, 51, 0)],
)
def test_gradients_of_the_loop_metric_go_on_after_a_kill(
    loaded, tokens, tmp_path, monkeypatch, kept, at, prompts
):
    for function in (HessianSet.run_pass, module.collect_metrics):
        monkeypatch.setattr(function, "__kwdefaults__", {**function.__kwdefaults__, "every": 0.0})
    monkeypatch.setattr(module, "KEPT_BYTES", kept)
    loopq.quantize(loaded, tokens, out=tmp_path / "whole", **BEST)
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "killed", progress=Killer(at), **BEST)
    seen = []
    monkeypatch.setattr(module, "unroll", counting(module.unroll, seen))
    loopq.quantize(loaded, tokens, out=tmp_path / "killed", **BEST)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert len(seen) == prompts
    assert not list(tmp_path.glob(".killed*"))


def test_asymmetric_calibration_goes_on_after_a_kill(loaded, tokens, tmp_path, monkeypatch):
    asked = {"inputs": "asymmetric", "sweeps": 2, "batch_size": 3, "threads": 1, **SETTINGS}
    loopq.quantize(loaded, tokens, out=tmp_path / "whole", **asked)
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "killed", progress=Killer(11), **asked)
    seen = []
    monkeypatch.setattr(sequential, "collect_pairs", counting(sequential.collect_pairs, seen))
    loopq.quantize(loaded, tokens, out=tmp_path / "killed", **asked)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    # Nine input groups, twice; twelve layers were solved when the kill came.
    assert len(seen) == 6
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "other", progress=Killer(11), **asked)
    seen.clear()
    loopq.quantize(loaded, tokens, out=tmp_path / "other", **(asked | {"alpha": 0.5}))
    assert len(seen) == 18


def counting(function, seen):
    def wrapper(*args, **kwargs):
        seen.append(1)
        return function(*args, **kwargs)

    return wrapper


def test_collect_goes_on_after_a_kill(loaded, tokens, tmp_path):
    job = job_of(loaded, tokens, batch_size=2)
    collect_rows(job, tmp_path / "whole", shard_batches=2)
    with pytest.raises(Kill):
        collect_rows(job, tmp_path / "parts", shard_batches=2, progress=Killer(5))
    with pytest.raises(DumpError, match=r"no manifest\.json"):
        Dump(tmp_path / "parts")
    with pytest.raises(DumpError, match="beginnings of another collection"):
        collect_rows(job_of(loaded, tokens.take(0, 4), batch_size=2), tmp_path / "parts", shard_batches=2)
    collect_rows(job, tmp_path / "parts", shard_batches=2)
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_step_choices_are_the_hessians_of_those_steps(loaded, tokens):
    job = job_of(loaded, tokens)
    steps = {p.name: [0, 1, 2] for p in job.selection.input_groups}
    apart = HessianSet(job, steps, per_step=True)
    together = HessianSet(job, steps)
    for sums in (apart, together):
        sums.run_pass(list(steps))
    for leader in steps:
        total = together.accumulators[leader].matrix()
        np.testing.assert_array_equal(total, apart.accumulators[leader].matrix([0, 1, 2]))
        each = [apart.accumulators[leader].matrix([t]) for t in range(3)]
        np.testing.assert_allclose(sum(each), total, rtol=1e-15)
        assert np.linalg.eigvalsh(total)[0] > -1e-6 * np.trace(total)


@pytest.mark.parametrize("steps", ["first", "0:2", "2", "1:", "all"])
def test_every_mode_is_recorded_and_equals_its_dump(loaded, tokens, tmp_path, steps):
    result = loopq.quantize(loaded, tokens, steps=steps, **SETTINGS)
    dump = tmp_path / "dump"
    collect_hessians(job_of(loaded, tokens), dump, per_step=True)
    again = loopq.solve(dump, steps=steps, **SETTINGS)
    for name, layer in result.layers.items():
        assert layer.same_as(again.layers[name])
        assert layer.report["steps"] == loopq.config.parse_steps(steps, 3)
        assert layer.report["n_rows"] == 240 * len(layer.report["steps"])
    assert result.settings["quantization"]["steps"] == steps


def test_modes_really_differ(loaded, tokens):
    results = [loopq.quantize(loaded, tokens, steps=s, **SETTINGS) for s in ("first", "all", "1:")]
    name = "transformer.core_block.0.mlp.fc.weight"
    codes = [r.layers[name].codes for r in results]
    assert not np.array_equal(codes[0], codes[1])
    assert not np.array_equal(codes[1], codes[2])


def test_layers_may_choose_their_own_steps(loaded, tokens):
    config = QuantConfig(
        overrides=(Override("*adapter*", {"steps": "first", "bits": 8}), Override("*.1.*", {"method": "rtn"}))
    )
    result = loopq.quantize(loaded, tokens, config, **SETTINGS)
    reports = {name: layer.report for name, layer in result.layers.items()}
    adapter = reports["transformer.adapter.weight"]
    assert (adapter["steps"], adapter["bits"], adapter["method_done"]) == ([0], 8, "gptq")
    assert reports["transformer.core_block.0.mlp.fc.weight"]["steps"] == [0, 1, 2]
    assert reports["transformer.core_block.1.mlp.fc.weight"]["method_done"] == "rtn"
    alone = loopq.quantize(loaded, tokens, steps="first", group_size=20, bits=8)
    assert result.layers["transformer.adapter.weight"].same_as(alone.layers["transformer.adapter.weight"])
    with pytest.raises(ConfigError, match="matches no shared parameter"):
        loopq.quantize(loaded, tokens, QuantConfig(overrides=(Override("nowhere", {"bits": 8}),)))


def test_parts_collected_apart_merge_to_the_same_bits_in_any_order(loaded, tokens, tmp_path, monkeypatch):
    parts = []
    for i, (first, last) in enumerate([(0, 4), (4, 7), (7, 10)]):
        collect_hessians(job_of(loaded, tokens.take(first, last)), tmp_path / f"part{i}")
        parts.append(tmp_path / f"part{i}")
    merge(parts, tmp_path / "abc")
    merge([parts[2], parts[0], parts[1]], tmp_path / "cab")
    assert digest(tmp_path / "abc") == digest(tmp_path / "cab")
    merge(parts[:2], tmp_path / "ab")
    merge([tmp_path / "ab", parts[2]], tmp_path / "ab-c")
    for leader in Dump(tmp_path / "abc").manifest.rows:
        a, b = (Dump(tmp_path / n).accumulator(leader, [0, 1, 2]).matrix() for n in ("abc", "ab-c"))
        np.testing.assert_array_equal(a, b)
    with pytest.raises(DumpError, match="count twice"):
        merge([parts[0], parts[0]], tmp_path / "twice")
    with monkeypatch.context() as broken:
        broken.setattr(
            "loopq.calibrate.dump.shutil.copyfile", lambda *a: (_ for _ in ()).throw(OSError(28, "No space"))
        )
        with pytest.raises(DumpError, match=r"full: cannot be written \(No space\)"):
            merge(parts, tmp_path / "full")
    assert not [p for p in tmp_path.iterdir() if "full" in p.name]
    with pytest.raises(DumpError, match="count twice"):
        merge([tmp_path / "ab", parts[1]], tmp_path / "twice")


@pytest.fixture
def dump(loaded, tokens, tmp_path):
    out = tmp_path / "dump"
    collect_rows(job_of(loaded, tokens), out, shard_batches=1)
    return out


def test_damaged_dumps_are_refused(dump, tmp_path):
    def damaged(change):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(dump, copy)
        change(copy)
        return copy

    def truncate(copy):
        path = copy / "shards" / "00000.safetensors"
        path.write_bytes(path.read_bytes()[:-7])

    def flip(copy):
        path = copy / "shards" / "00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    def manifest(**changes):
        return lambda copy: reseal(copy / "manifest.json", lambda data: data.update(changes))

    def unsealed(copy):
        data = json.loads((copy / "manifest.json").read_text())
        (copy / "manifest.json").write_text(json.dumps(data | {"seed": 4}))

    for change, match in [
        (truncate, r"00000\.safetensors: truncated or altered"),
        (flip, r"00001\.safetensors: altered: its SHA-256"),
        (lambda c: (c / "model" / "model.safetensors").unlink(), r"model\.safetensors: missing"),
        (lambda c: (c / "manifest.json").write_text("{"), "not valid JSON"),
        (unsealed, r"manifest\.json: altered: its sha256 is not that of its content"),
        (manifest(version=9), "version 9; this loopq reads versions 1 to 2"),
        (manifest(format="other"), "its format is not 'loopq-dump'"),
        (manifest(kind="pictures"), "kind: 'pictures'; allowed: 'rows', 'hessian'"),
        (manifest(rows={}), "not in the manifest"),
        (manifest(rows_dtype="F16"), r"the manifest says F16"),
        (manifest(parameters=[{"name": "x"}]), r"parameters\[0\]: 'in_features' is missing"),
    ]:
        with pytest.raises(DumpError, match=match):
            Dump(damaged(change))


def test_rows_in_bfloat16_and_float16(loaded, tokens, tmp_path, plain):
    for kind in ("bfloat16", "float16"):
        collect_rows(job_of(loaded, tokens), tmp_path / kind, rows_dtype=kind)
        result = loopq.solve(tmp_path / kind, **SETTINGS)
        same = [
            (layer.codes == store.read(plain).layers[name].codes).mean()
            for name, layer in result.layers.items()
        ]
        assert min(same) > 0.95
    with pytest.raises(ConfigError, match="rows_dtype"):
        collect_rows(job_of(loaded, tokens), tmp_path / "x", rows_dtype="int8")


def test_a_step_the_dump_lacks_is_an_error(loaded, tokens, tmp_path, dump):
    with pytest.raises(ConfigError, match="steps '3'"):
        loopq.solve(dump, steps="3", **SETTINGS)
    collect_hessians(job_of(loaded, tokens), tmp_path / "late", steps=[1, 2])
    with pytest.raises(DumpError, match=r"only the sum over steps \[1, 2\]"):
        loopq.solve(tmp_path / "late", steps="first", **SETTINGS)


def test_load_gives_the_dequantized_model(loaded, tokens, plain):
    again = loopq.load(plain)
    checkpoint = store.read(plain)
    own = dict(again.model.state_dict())
    for name, weight in weights_of(checkpoint).items():
        assert torch.equal(own[name], torch.from_numpy(weight))
    for name, tensor in loaded.model.state_dict().items():
        if name not in checkpoint.layers:
            assert torch.equal(own[name], tensor)
    batch = next(iter(tokens.batches(2)))
    with replaced(loaded.system, weights_of(checkpoint)):
        expected = loaded.system.rollout(batch, 3)
    assert torch.equal(again.system.rollout(batch, 3), expected)
    assert again.model.lm_head.weight is again.model.transformer["wte"].weight


def test_replaced_weights_come_back_also_after_an_error(loaded, plain):
    before = {k: v.clone() for k, v in loaded.model.state_dict().items()}
    with pytest.raises(RuntimeError), replaced(loaded.system, weights_of(store.read(plain))):
        raise RuntimeError
    assert all(torch.equal(v, before[k]) for k, v in loaded.model.state_dict().items())


def test_comparison_of_a_model_with_itself(loaded, tokens):
    own = {p.name: loaded.system.parameter(p).detach().numpy() for p in loaded.system.shared_parameters(3)}
    reference, same = compare(loaded.system, {"same": own}, tokens, seeds=(0, 1), batch_size=4)
    assert np.array_equal(same.kl, np.zeros((2, 10)))
    assert np.array_equal(same.agreement, np.ones((2, 10)))
    assert np.array_equal(same.nll, reference.nll)
    assert not np.array_equal(reference.nll[0], reference.nll[1])
    other = {n: w + 0.05 * np.sign(w) for n, w in own.items()}
    worse = compare(loaded.system, {"other": other}, tokens)[1]
    assert (worse.kl > 0).all()


def test_damaged_checkpoints_are_refused(plain, tmp_path):
    def damaged(change):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(plain, copy)
        change(copy)
        return copy

    def cut(copy):
        path = copy / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    def index(change):
        return lambda copy: reseal(copy / "loopq.json", change)

    def unsealed(copy):
        path = copy / "loopq.json"
        path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))

    for change, match in [
        (cut, "truncated or altered"),
        (lambda c: (c / "loopq.json").unlink(), "not a loopq checkpoint"),
        (index(lambda d: d.update(version=7)), "version 7"),
        (unsealed, r"loopq\.json: altered: its sha256 is not that of its content"),
        (index(lambda d: d.pop("layers")), "'layers' is missing"),
        (index(lambda d: d["layers"].pop(0)), "holds packed codes of no layer"),
        (index(lambda d: d["files"].clear()), "model.safetensors and report.jsonl must be among them"),
        (index(lambda d: d["layers"][0].update(bits=8)), r"transformer\.adapter\.weight_packed"),
        (
            index(lambda d: d["layers"][0].update(scale_dtype="float32")),
            r"transformer\.adapter\.weight_scale",
        ),
        (index(lambda d: d["layers"][0].update(shape=[1, 2])), "weight_shape"),
        (index(lambda d: d["layers"][0].update(name="nothing.weight")), "is missing"),
        (index(lambda d: d["files"][0].update(file="../x")), r"files\[0\]\.file: '\.\./x'; allowed: a plain name"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            store.read(damaged(change))


def test_nothing_is_overwritten(loaded, tokens, tmp_path, plain, dump):
    before = digest(plain)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        loopq.quantize(loaded, tokens, out=plain, **SETTINGS)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        loopq.solve(dump, out=plain, **SETTINGS)
    with pytest.raises(DumpError, match="finished dump"):
        collect_rows(job_of(loaded, tokens), dump)
    assert digest(plain) == before


def test_nan_in_a_weight_is_named(loaded, tokens):
    weight = loaded.system.parameter(loaded.system.shared_parameters(3)[4])
    with torch.no_grad():
        weight[3, 5] = float("inf")
    with pytest.raises(NonFiniteError, match=r"(core_block\.0\.mlp\.proj\.weight|core_block\.1)"):
        loopq.quantize(loaded, tokens, method="rtn")


def test_a_full_disk_leaves_nothing_behind(loaded, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("loopq.checkpoint.files.free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match="the disk has"):
        loopq.quantize(loaded, tokens, out=tmp_path / "out", **SETTINGS)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("loopq.calibrate.collect.free_bytes", lambda path: 1000)
    with pytest.raises(DumpError, match="the disk has"):
        collect_rows(job_of(loaded, tokens), tmp_path / "dump")


def test_solving_needs_no_torch(dump, tmp_path, plain):
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'scipy', 'matplotlib', 'cupy'): sys.modules[name] = None\n"
        "from loopq.cli import main\n"
        f"sys.exit(main(['solve', {str(dump)!r}, '--out', {str(tmp_path / 'bare')!r}, '--bits', '3', "
        "'--group-size', '20']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "transformer.adapter.weight" in done.stdout
    assert (tmp_path / "bare" / "loopq.json").is_file()


def test_evaluation_takes_its_own_number_of_prompts(loaded, tokens, tmp_path, plain, monkeypatch):
    monkeypatch.setattr("loopq.config.EVALUATION_PROMPTS", 3)
    text = tmp_path / "text.txt"
    text.write_text("What is said here is said once, and what is meant is left open. " * 8)
    for given, n_prompts, count in (
        (None, None, 3),
        (text, None, 3),
        (text, 5, 5),
        (tokens, None, 10),
        (tokens, 4, 4),
    ):
        found = evaluate(loaded, [plain], given, n_prompts=n_prompts, seq_len=24)
        assert found[0].kl.shape == (1, count)
    with pytest.raises(ConfigError, match="n_prompts must be at least 1; got 0"):
        evaluate(loaded, [plain], text, n_prompts=0, seq_len=24)


def test_a_preset_is_its_settings_and_keywords_win_over_it(loaded, tokens, tmp_path):
    few = tokens.take(0, 3)
    loopq.quantize(loaded, few, out=tmp_path / "preset", preset="best", **SETTINGS)
    loopq.quantize(
        loaded,
        few,
        out=tmp_path / "fields",
        method="full",
        metric="loop",
        damping_kind="diagonal",
        **SETTINGS,
    )
    assert digest(tmp_path / "preset") == digest(tmp_path / "fields")
    plain = loopq.quantize(loaded, few, preset="best", metric="inputs", **SETTINGS)
    layer = plain.settings["quantization"]["layer"]
    assert (layer["method"], layer["metric"], layer["damping_kind"]) == ("full", "inputs", "diagonal")


def test_the_estimate_counts_gradients_and_the_runs_of_the_text(loaded, tokens):
    def estimate(**changes):
        config = dataclasses.replace(QuantConfig(), **changes)
        return Run.prepare(loaded, tokens, config, None, 8, 0, 1).estimate(None)

    plain, best = estimate(), estimate(layer=preset("best").layer)
    assert (plain.metric.n_gradients, plain.metric_seconds) == (0, 0.0)
    assert "gradients" not in str(plain)
    assert best.metric.n_gradients == 4 * len(tokens.sequences)
    assert best.seconds > best.metric_seconds > 0
    assert "40 gradients for the loop metric" in str(best)
    groups = len(Run.prepare(loaded, tokens, QuantConfig(), None, 8, 0, 1).job.selection.input_groups)
    assert estimate(inputs="asymmetric", sweeps=2).n_passes == 4 * groups
    assert estimate(inputs="closed-loop").n_passes == 2


def test_settings_are_refused_before_the_model_is_looked_for(tmp_path):
    for settings, match in [
        ({"bitz": 3}, "unknown setting bitz; known: act_order"),
        ({"method": "gptk"}, "did you mean gptq"),
        ({"threads": -1}, "threads must be 0"),
        ({"preset": "good"}, "preset must be one of best"),
    ]:
        with pytest.raises(ConfigError, match=match):
            loopq.quantize(tmp_path / "nowhere", **settings)


def test_a_dump_says_that_it_holds_no_gradients(dump):
    with pytest.raises(
        ConfigError, match=r"layer transformer\.adapter\.weight: metric 'loop' needs gradients"
    ):
        loopq.solve(dump, method="full", metric="loop")


def test_the_weight_that_is_not_finite_is_named_where_activations_show_it(loaded, tokens):
    with torch.no_grad():
        loaded.model.get_parameter("transformer.core_block.0.mlp.fc.weight")[0, 0] = float("nan")
    with pytest.raises(
        NonFiniteError,
        match=r"core_block\.0\.mlp\.proj.*own transformer\.core_block\.0\.mlp\.fc\.weight holds NaN",
    ):
        loopq.quantize(loaded, tokens)


def test_a_merge_that_the_disk_cannot_hold_leaves_nothing(loaded, tokens, tmp_path, monkeypatch):
    parts = [tmp_path / "a", tmp_path / "b"]
    for seed, part in enumerate(parts):
        collect_hessians(job_of(loaded, tokens, seed=seed), part)
    monkeypatch.setattr("loopq.checkpoint.files.free_bytes", lambda path: 1000)
    with pytest.raises(DumpError, match=r"sum: takes .* MiB, the disk has 0\.0"):
        merge(parts, tmp_path / "sum")
    assert not list(tmp_path.glob("*sum*"))
    monkeypatch.undo()
    assert merge(parts, tmp_path / "sum").kind == "hessian"


def test_a_dump_that_was_begun_needs_only_the_room_that_is_left(loaded, tokens, tmp_path, monkeypatch):
    job, out = job_of(loaded, tokens, batch_size=2), tmp_path / "dump"
    monkeypatch.setattr("loopq.calibrate.collect.free_bytes", lambda path: 1000)
    with pytest.raises(DumpError, match="keep Hessians instead"):
        collect_rows(job, out, shard_batches=1)
    assert not out.exists()
    monkeypatch.undo()
    with pytest.raises(Kill):
        collect_rows(job, out, shard_batches=1, progress=Killer(8))
    done = sum(p.stat().st_size for p in (out / "shards").glob("*.safetensors"))
    need = done * 10 // 8
    monkeypatch.setattr("loopq.calibrate.collect.free_bytes", lambda path: need - done + 8192)
    assert collect_rows(job, out, shard_batches=1).kind == "rows"
