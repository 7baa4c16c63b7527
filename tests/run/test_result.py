"""From solved layers to a checkpoint: from a model or from a dump of any kind, the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import loopq
from loopq.calibrate.collect import collect_hessians, collect_rows
from loopq.checkpoint import native as store
from loopq.errors import ConfigError, DumpError
from loopq.steps import parse_steps
from tests.support.runs import SETTINGS, digest, job_of


@pytest.fixture
def dump(loaded, tokens, tmp_path):
    out = tmp_path / "dump"
    collect_rows(job_of(loaded, tokens), out, shard_batches=1)
    return out


def test_checkpoint_holds_what_was_solved(loaded, tokens, checkpoint_folder):
    result = loopq.quantize(loaded, tokens, batch_size=3, **SETTINGS)
    again = store.read(checkpoint_folder)
    assert list(result.layers) == [p.name for p in loaded.system.shared_parameters(3)]
    for name, layer in result.layers.items():
        assert layer.same_as(again.layers[name])
        assert again.layers[name].report == json.loads(json.dumps(layer.report))
    assert again.settings["n_steps"] == 3
    config = loopq.QuantConfig.from_json(again.settings["quantization"])
    assert config == loopq.QuantConfig.of(**SETTINGS)
    assert config.layer.calibration.steps == "all"


def test_solve_from_a_dump_gives_the_same_bytes(loaded, tokens, tmp_path, checkpoint_folder):
    for shards in (1, 2, 7):
        dump = tmp_path / f"dump-{shards}"
        collect_rows(job_of(loaded, tokens, batch_size=3), dump, shard_batches=shards)
        for threads in (1, 2):
            out = tmp_path / f"solved-{shards}-{threads}"
            loopq.solve(dump, out=out, threads=threads, **SETTINGS)
            assert digest(out) == digest(checkpoint_folder)


@pytest.mark.parametrize("weights", ["balanced", "alpha=1/4"])
def test_a_dump_of_rows_knows_each_step_apart(loaded, tokens, tmp_path, weights):
    settings = SETTINGS | {"step_weights": weights}
    loopq.quantize(loaded, tokens, out=tmp_path / "plain", batch_size=3, **settings)
    collect_rows(job_of(loaded, tokens, batch_size=3), tmp_path / "dump")
    loopq.solve(tmp_path / "dump", out=tmp_path / "solved", threads=1, **settings)
    assert digest(tmp_path / "solved") == digest(tmp_path / "plain")
    collect_hessians(job_of(loaded, tokens, batch_size=3), tmp_path / "summed")
    with pytest.raises(ConfigError, match="only their sum was collected"):
        loopq.solve(tmp_path / "summed", **settings)


def test_solve_from_hessians_gives_the_same_bytes(loaded, tokens, tmp_path, checkpoint_folder):
    for per_step in (False, True):
        dump = tmp_path / f"hessians-{per_step}"
        collect_hessians(job_of(loaded, tokens, batch_size=3), dump, per_step=per_step)
        loopq.solve(dump, out=tmp_path / f"out-{per_step}", **SETTINGS)
        assert digest(tmp_path / f"out-{per_step}") == digest(checkpoint_folder)


@pytest.mark.parametrize("steps", ["first", "0:2", "2", "1:", "all"])
def test_every_choice_of_steps_is_recorded_and_equals_its_dump(loaded, tokens, tmp_path, steps):
    result = loopq.quantize(loaded, tokens, steps=steps, **SETTINGS)
    dump = tmp_path / "dump"
    collect_hessians(job_of(loaded, tokens), dump, per_step=True)
    again = loopq.solve(dump, steps=steps, **SETTINGS)
    for name, layer in result.layers.items():
        assert layer.same_as(again.layers[name])
        assert layer.report["steps"] == parse_steps(steps, 3)
        assert layer.report["n_rows"] == 240 * len(layer.report["steps"])
    config = loopq.QuantConfig.from_json(result.settings["quantization"])
    assert config.layer.calibration.steps == steps


def test_a_dump_says_what_it_cannot_do(dump):
    with pytest.raises(
        DumpError, match=r"no loop metric of layer transformer\.adapter\.weight: collect again"
    ):
        loopq.solve(dump, metric="loop")
    with pytest.raises(ConfigError, match="inputs 'asymmetric' run the model between layers"):
        loopq.solve(dump, inputs="asymmetric")
    for settings in ({"tune": "scales"}, {"allocate": 3.5}):
        with pytest.raises(ConfigError, match="allocate and tune run the model"):
            loopq.solve(dump, **settings)


def test_solving_needs_no_torch(dump, tmp_path):
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
