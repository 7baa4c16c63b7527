"""The loop metric in a dump: what a solve without the model makes of it is what the model's own run makes."""

from __future__ import annotations

import numpy as np
import pytest

import loopq
from loopq.calibrate.dump import Dump
from loopq.calibrate.merge import merge
from loopq.calibrate.sums_file import gradient_sums_from
from loopq.errors import ConfigError, DumpError
from loopq.formats.native import read
from loopq.storage.files import RawTensor, read_tensors
from tests.support.checkpoints import reseal
from tests.support.metric_dumps import collected
from tests.support.runs import job_of


@pytest.fixture
def dump(loaded, tokens, tmp_path):
    return collected(loaded, tokens, tmp_path / "dump")


BEST = {"preset": "best", "bits": 3, "group_size": 20, "metric_prompts": 3, "metric_draws": 2,
        "inputs": "open"}  # fmt: skip


def same(result, other):
    assert list(result.layers) == list(other.layers)
    assert all(layer.same_as(other.layers[name]) for name, layer in result.layers.items())


def test_solve_reaches_preset_best(loaded, tokens, dump):
    result = loopq.quantize(loaded, tokens, threads=1, batch_size=3, **BEST)
    again = loopq.solve(dump, threads=1, **BEST)
    same(result, again)
    adapter = again.layers["transformer.adapter.weight"].report
    assert (adapter["metric"], adapter["metric_gradients"]) == ("loop", 6)


def test_metric_auto_takes_what_the_dump_holds(dump, tmp_path):
    result = loopq.solve(dump, bits=3, group_size=20, threads=1, out=tmp_path / "q")
    same(result, loopq.solve(dump, threads=1, **BEST | {"beam": 16, "rounds": 1}))
    method = read(tmp_path / "q").settings["quantization"]["layer"]["method"]
    assert method["metric"] == {"kind": "loop", "draws": 2, "prompts": 3}
    inputs = loopq.solve(dump, preset="fast", bits=3, group_size=20, threads=1)
    assert "metric" not in inputs.layers["transformer.adapter.weight"].report


def test_several_passes_give_the_same_sums(loaded, tokens, dump, tmp_path):
    job = job_of(loaded, tokens)
    widest = max(p.in_features for p in job.selection.distinct_inputs)
    other = collected(loaded, tokens, tmp_path / "passes", memory=8 * widest * (widest + 1))
    for entry in Dump(dump).manifest.metrics:
        mine, theirs = (
            read_tensors(
                folder / next(m.file for m in Dump(folder).manifest.metrics if m.parameter == entry.parameter)
            )
            for folder in (dump, other)
        )
        assert {n: t.data.tobytes() for n, t in mine.items()} == {
            n: t.data.tobytes() for n, t in theirs.items()
        }


def test_steps_and_counts_must_be_those_of_the_collection(loaded, tokens, dump, tmp_path):
    with pytest.raises(
        ConfigError, match="over 3 prompts and 4 draws is asked for; the dump's is over 3 and 2"
    ):
        loopq.solve(dump, **(BEST | {"metric_draws": 4}))
    late = collected(loaded, tokens, tmp_path / "late", steps=[1, 2])
    same(
        loopq.solve(late, threads=1, steps="1:", **BEST),
        loopq.quantize(loaded, tokens, threads=1, batch_size=3, steps="1:", **BEST),
    )
    with pytest.raises(DumpError, match=r"its loop metric is over steps \[1, 2\]; \[0, 1, 2\] asked"):
        loopq.solve(late, **BEST)


def test_sums_of_gradients_cannot_be_merged(loaded, tokens, dump, tmp_path):
    other = collected(loaded, tokens, tmp_path / "other", seed=1)
    with pytest.raises(DumpError, match="holds a loop metric, which cannot be added to another"):
        merge([dump, other], tmp_path / "merged")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda d: d["metrics"][0].update(file="../x"),
            r"metrics\[0\]\.file: .*; allowed: shards/, hessians/ or metrics/",
        ),
        (lambda d: d["metrics"][0].update(file="hessians/009.safetensors"), "or a file of another kind"),
        (
            lambda d: d["metrics"][0].update(parameter="x.weight"),
            "metrics: a name that is not among the input groups",
        ),
        (lambda d: d["metrics"].append(d["metrics"][0]), "or stands twice"),
        (lambda d: d["metrics"][0].update(n_draws=9), "metrics: of unlike prompts and draws"),
        (lambda d: d["metrics"][0].update(n_prompts=0), "n_prompts: 0; allowed: 1 to"),
        (lambda d: d["metrics"][0].update(sha256="0" * 64), "000.safetensors"),
    ],
)
def test_a_manifest_that_is_wrong(dump, change, match):
    reseal(dump / "manifest.json", change)
    with pytest.raises(DumpError, match=match):
        Dump(dump)


def swap(d):
    a, b = (
        next(m for m in d["metrics"] if m["parameter"].endswith(end))
        for end in ("adapter.weight", "mlp.proj.weight")
    )
    a["parameter"], b["parameter"] = b["parameter"], a["parameter"]


def test_a_metric_of_another_layer(dump):
    reseal(dump / "manifest.json", swap)
    with pytest.raises(DumpError, match=r"tensor 'right' is F64 .*; expected F64|blocks of"):
        loopq.solve(dump, **BEST)


@pytest.mark.parametrize(
    ("entry", "value", "match"),
    [
        ("right", np.nan, "an entry that no sum of squares can have"),
        ("left.00000", -1.0, "an entry that no sum of squares can have"),
        ("left.00001", None, "tensor 'left.00001' is F64"),
    ],
)
def test_sums_that_cannot_be(dump, entry, value, match):
    opened = Dump(dump)
    metric = opened.manifest.metrics[0]
    parameter = next(p for p in opened.manifest.parameters if p.name == metric.parameter)
    tensors = {n: np.array(t.array()) for n, t in read_tensors(dump / metric.file).items()}
    if value is None:
        tensors[entry] = np.zeros((2, 3))
    else:
        tensors[entry][0, 0] = value
    with pytest.raises(DumpError, match=match):
        gradient_sums_from({n: RawTensor.of(a) for n, a in tensors.items()}, parameter, "here")
