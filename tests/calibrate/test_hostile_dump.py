"""Dumps that were changed, by accident or on purpose; collections that were killed while they cleared up."""

from __future__ import annotations

import os
import shutil

import pytest

from loopq.calibrate import collect, rollouts
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.dump import Dump, Manifest
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.calibrate.merge import merge
from loopq.errors import DumpError
from loopq.models.load import load_model
from loopq.storage.files import replacing, write_json

from ..soak.files import FINE, campaign, dumps
from ..support.checkpoints import reseal
from ..support.runs import digest, job_of


@pytest.mark.parametrize("n", [200, pytest.param(800, marks=pytest.mark.slow)])
def test_campaign(n):
    counts = campaign([dumps], range(n))
    assert counts.failures == []
    assert counts.outcomes.pop("ms at most") > 0
    assert sum(counts.outcomes.values()) == n
    assert counts.outcomes["refused"] > n / 2
    if n > 200:
        assert set(counts.outcomes) == set(FINE)


@pytest.fixture
def made(tmp_path):
    return {target.name: target.folder for target in dumps(tmp_path)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda d: d["files"][0].update(file="../x.safetensors"),
            r"files\[0\]\.file: .*; allowed: shards/, hessians/ or metrics/",
        ),
        (
            lambda d: d["files"][0].update(file="hessians/000.safetensors"),
            "not those of a dump of kind 'rows'",
        ),
        (lambda d: d["files"][0].update(input_group="x.q.weight"), "not those of a dump of kind 'rows'"),
        (lambda d: d["files"].clear(), "none, without model.safetensors, or a name that stands twice"),
        (lambda d: d["files"].append(d["files"][0]), "a name that stands twice"),
        (
            lambda d: d["model"][0].update(file="../config.json"),
            r"model\[0\]\.file: .*; allowed: a plain name",
        ),
        (lambda d: d["model"].pop(), "without model.safetensors"),
        (
            lambda d: d["parameters"][0].update(name="/abs/PWN"),
            r"parameters\[0\]: parameter: .*; allowed: a plain name",
        ),
        (lambda d: d["parameters"].append(d["parameters"][0]), "parameters: a name stands twice"),
        (
            lambda d: d["parameters"][0].update(in_features=0),
            r"x\.q\.weight: features: \[0\]: 0; allowed: 1 to",
        ),
        (lambda d: d["parameters"][0].update(invocations=10**9), "invocations: .*; allowed: 1 to 1048576"),
        (
            lambda d: d["parameters"][0].update(out_features=7),
            r"shape \[6, 8\] of tensor 'x.q.weight'; the manifest says",
        ),
        (
            lambda d: d["input_groups"].update({"x.k.weight": "x.z.weight"}),
            "input_groups: a name that is not among the parameters",
        ),
        (lambda d: d["rows"].update({"x.z.weight": {}}), "rows: a name that is not among the input groups"),
        (
            lambda d: d["rows"]["x.q.weight"].update({"2": 40}),
            "rows: a step that the parameter does not have",
        ),
        (lambda d: d["rows"]["x.q.weight"].update({"٣": 40}), "a whole number as key"),
        (lambda d: d["rows"]["x.q.weight"].update({"1": 41}), "do not add up"),
        (
            lambda d: d["metrics"].append(
                {
                    "file": "metrics/000.safetensors",
                    "sha256": "0" * 64,
                    "n_bytes": 1,
                    "parameter": "x.q.weight",
                }
                | {"steps": [0], "n_prompts": 1, "n_draws": 1}
            ),
            "metrics: they go with a dump of kind 'hessian'",
        ),
        (lambda d: d["calibration"].pop("n_tokens"), "calibration: 'n_tokens' is missing"),
    ],
)
def test_a_manifest_that_is_wrong(made, change, match):
    reseal(made["rows"] / "manifest.json", change)
    with pytest.raises(DumpError, match=match):
        dump = Dump(made["rows"])
        dump.weights()


def test_a_hessian_that_is_not_the_one_of_the_manifest(made):
    reseal(made["hessian"] / "manifest.json", lambda d: d["rows"]["x.q.weight"].update({"1": 41}))
    with pytest.raises(DumpError, match=r"000\.safetensors: not the Hessian that the manifest describes"):
        Dump(made["hessian"]).accumulator("x.q.weight", [0, 1])


def test_the_same_checks_before_a_manifest_is_written(made):
    data = Manifest.read(made["rows"])
    with pytest.raises(DumpError, match="rows: a step that the parameter does not have"):
        Manifest(**{**vars(data), "rows": {"x.q.weight": {5: 1}}})


def test_a_merge_of_merged_dumps_knows_all_parts(made, tmp_path):
    parts = []
    for seed in range(3):
        shutil.copytree(made["hessian"], tmp_path / f"part{seed}")
        parts.append(tmp_path / f"part{seed}")
        reseal(parts[-1] / "manifest.json", lambda d, seed=seed: d.update(seed=seed))
    merge(parts[:2], tmp_path / "two")
    merge([tmp_path / "two", parts[2]], tmp_path / "three")
    assert len(Manifest.read(tmp_path / "three").calibration["parts"]) == 3
    with pytest.raises(DumpError, match="count twice"):
        merge([tmp_path / "three", parts[0]], tmp_path / "again")


@pytest.fixture
def job(tiny_folder, tokens):
    loaded = load_model(tiny_folder)
    return job_of(loaded, tokens, batch_size=3)


@pytest.mark.parametrize("run", [collect_rows, collect_hessians])
def test_a_collection_killed_in_its_clean_up_is_finished(job, tmp_path, monkeypatch, run):
    out = tmp_path / "dump"
    with monkeypatch.context() as broken:
        broken.setattr(collect, "finish_dump", lambda out: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(job, out)
    (out / "work").mkdir(exist_ok=True)
    assert (out / "manifest.json").exists()
    with monkeypatch.context() as idle:
        idle.setattr(rollouts, "Observer", lambda *a, **k: pytest.fail("ran again"))
        assert run(job, out) == Dump(out).manifest
    assert {p.name for p in out.iterdir()} <= {"manifest.json", "model", "shards", "hessians"}
    with pytest.raises(DumpError, match="holds a finished dump"):
        run(job, out)


def left_by_the_dead(file, text):
    """The leftovers of a process that was killed while it wrote a file."""
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    with replacing(file) as temporary:
        temporary.touch()
        temporary.with_name(temporary.name.replace(f"-{os.getpid()}-", f"-{dead}-")).write_text(text)
    file.unlink()


def test_a_collection_killed_in_its_claim_starts_again(job, tmp_path):
    collect_rows(job, tmp_path / "other", shard_batches=1)
    left_by_the_dead(tmp_path / "dump" / "collecting.json", "{")
    collect_rows(job, tmp_path / "dump", shard_batches=1)
    assert digest(tmp_path / "dump") == digest(tmp_path / "other")


def test_what_a_killed_collection_was_writing_is_removed(job, tmp_path):
    out = tmp_path / "dump"
    collect_rows(job, tmp_path / "other", shard_batches=1)
    for folder in (out, out / "shards", out / "model"):
        left_by_the_dead(folder / "00001.safetensors", "a whole shard")
    shutil.copy(tmp_path / "other" / "manifest.json", tmp_path)
    with pytest.raises(DumpError, match="exists and is not empty"):
        collect_rows(job, out, shard_batches=1)
    collect.write_json(out / "collecting.json", {"key": job.fingerprint("float32", 1)})
    collect_rows(job, out, shard_batches=1)
    assert sorted(p.name for p in out.rglob("*")) == sorted(p.name for p in (tmp_path / "other").rglob("*"))


def test_a_shard_of_other_layers_is_refused(job, tmp_path):
    (tmp_path / "shards").mkdir()
    rows = {"absent.weight": {"0": 1}}
    shard = {"sha256": "0" * 64, "n_bytes": 1, "batches": [0, 1], "rows": rows}
    write_json(tmp_path / "shards" / "00000.json", shard)
    with pytest.raises(
        DumpError, match=r"00000\.json: rows of 'absent\.weight', which is not collected here"
    ):
        collect._finish_rows(job, tmp_path, "F32")
