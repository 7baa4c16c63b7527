"""`loopq quantize`: what it prints, what it leaves, and what it refuses before any work."""

from __future__ import annotations

import json
import os
import resource

import pytest

from tests.support.runs import TINY, digest, in_ranks


def reports(folder):
    """The report of every layer."""
    return [json.loads(line) for line in (folder / "report.jsonl").read_text().splitlines()]


def test_quantize_says_what_it_did_to_every_layer(saved_model, tmp_path, command):
    out = tmp_path / "q"
    asked = ("--preset", "paper", "--bits", 3, "--group-size", 16, "--set", "rank_threshold=0.001", *TINY)
    code, text, err = command("quantize", saved_model, "--out", out, *asked)
    assert code == 0
    assert "9 layers, 3 steps: about" in err
    assert "transformer.core_block.1.mlp.proj.weight" in text
    assert "read back and compared" in text
    assert "0-2" in text
    for report in reports(out):
        assert report["method_asked"] == report["method_done"] == "gptq"
        assert report["proxy"] < report["proxy_rtn"]
        assert report["n_rows"] == 6 * 24 * 3
        assert 1 <= report["rank"] <= report["shape"][1]
    code, text, _ = command("inspect", out)
    assert code == 0
    assert "INT3" in text


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_quantize_writes_the_format_asked_for(saved_model, tmp_path, command, form):
    out = tmp_path / "q"
    args = ("quantize", saved_model, "--out", out, "--bits", 4, "--group-size", 16, "--format", form, *TINY)
    code, text, err = command(*args)
    assert code == 0, err
    assert "read back from disk: 9 layers equal, number by number" in text
    assert [p.name for p in tmp_path.iterdir()] == ["q"]
    code, text, _ = command("inspect", out)
    assert code == 0
    assert f"format {form}" in text
    assert command(*args)[0] == 1


@pytest.mark.slow
def test_the_best_preset_and_the_hint_that_leads_to_it(saved_model, tmp_path, command):
    code, _, err = command("quantize", saved_model, "--out", tmp_path / "plain", *TINY)
    assert code == 0
    assert "hint: --preset best" in err
    code, _, err = command("quantize", saved_model, "--out", tmp_path / "best", "--preset", "best", *TINY)
    assert code == 0
    assert "28/28 gradients" in err, "four draws of six prompts, and of one ahead of them"
    assert "hint" not in err
    data = json.loads(command("inspect", tmp_path / "best", "--json")[1])
    method = data["settings"]["quantization"]["layer"]["method"]
    assert method["name"] == "gptq-cd"
    assert method["metric"]["kind"] == "loop"
    assert method["damping"]["kind"] == "diagonal"
    said = command("inspect", tmp_path / "best")[1]
    assert "metric loop" in said
    assert "6 prompts, 144 tokens of embedded calibration text" in said


def test_options_beside_a_preset_and_overrides_win(saved_model, tmp_path, command):
    out = tmp_path / "less"
    code, text, _ = command(
        "quantize", saved_model, "--out", out, "--preset", "best", "--metric", "inputs", "--layer",
        "*adapter*=>method=gptq,precision=float32", *TINY,
    )  # fmt: skip
    assert code == 0
    assert "gptq-cd" in text
    methods = {r["layer"]: r["method_done"] for r in reports(out)}
    assert methods.pop("transformer.adapter.weight") == "gptq"
    assert set(methods.values()) == {"gptq-cd"}


@pytest.mark.parametrize(
    ("args", "match"),
    [
        # Told before the model is looked for.
        (["nowhere", "--bits", "5"], "argument --bits: must be one of 2, 3, 4, 8; got 5"),
        (["nowhere", "--bits", "x"], "argument --bits: 'x': give a whole number"),
        (["nowhere", "--group-size", "0"], "--group-size must be -1"),
        (["nowhere", "--method", "gptk"], "gptq, gptq-cd, rtn, trellis; got 'gptk' (did you mean gptq?)"),
        (["nowhere", "--n-prompts", "0"], "argument --n-prompts: must be at least 1; got 0"),
        (["nowhere", "--n-steps", "0"], "argument --n-steps: must be between 1 and 65536; got 0"),
        (["nowhere", "--layer", "*=>bits=5"], "override '*': bits must be one of 2, 3, 4, 8; got 5"),
        (["nowhere", "--layer", "*=>bit=8"], "unknown setting bit (did you mean bits?); known: act_order"),
        (["nowhere", "--exclude", "re:("], "pattern 're:(' is no regular expression"),
        (["nowhere", "--set", "alpha=2"], "argument --set: alpha must be between 0 and 1; got 2.0"),
        (["nowhere", "--fit", "-1"], "--fit must be above 0; got -1.0"),
        (["nowhere", "--fit", "3", "--set", "fit_bits=5"], "--set fit_bits must be of 2, 3, 4, 8; got 5"),
        (["nowhere", "--fit", "3", "--set", "fit_group_sizes=0"], "--set fit_group_sizes must be -1"),
        (["nowhere", "--set", "step_weights=loud"], "--set step_weights must be sum, NAME or NAME=VALUE"),
        # Options that nothing would read.
        (["nowhere", "--set", "act_order=true"], "--set act_order goes with --method gptq; method gptq-cd"),
        (["nowhere", "--method", "rtn", "--set", "precision=float32"], "--set precision goes with --method gptq; "),
        (["nowhere", "--set", "sweeps=2"], "--set sweeps goes with --inputs asymmetric; inputs open would not read it"),
        (["nowhere", "--set", "fit_bits=3,4"], "--set fit_bits goes with --fit"),
        # The reason for needing the model.
        (["nowhere"], "no model 'nowhere'"),
        (["{model}", "--set", "steps=7"], "the rollout has 3 steps, 0 to 2"),
        (["{model}", "--exclude", "zzz"], "matches no shared parameter"),
        (["{model}", "--layer", "zzz=>bits=8"], "override 'zzz' matches no shared parameter"),
        (["{model}", "--layer", "*=>act_order=true,method=rtn"], "act_order goes with method gptq; method rtn"),
        (["{model}", "--method", "dense"], "nothing is left to quantize"),
        (["{model}", "--memory", "1K"], "above the limit of 0.00 MiB: raise --memory"),
        (["{empty}"], "a file; name the folder"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line_and_leave_nothing(saved_model, tmp_path, command, args, match):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    args = [a.format(model=saved_model, empty=empty) for a in args]
    code, out, err = command("quantize", *args, "--out", tmp_path / "o")
    assert code == 2
    assert match in err
    assert ": error: " in err
    assert len([line for line in err.splitlines() if "error" in line]) == 1
    assert "Traceback" not in err
    assert out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["{model}", "--out", "{tmp}/o", "--calibration", "{empty}"], "empty.txt: the text is empty"),
        (["{model}", "--out", "{tmp}/o", "--calibration", "{tmp}/none.txt"], "none.txt: missing"),
        # Refused before the model is looked for.
        (["nowhere", "--out", "{empty}"], "a file stands there"),
        (["nowhere", "--out", "{empty}/o"], "is a file, so that no folder can be made in it"),
    ],
)
def test_files_that_cannot_be_are_one_line_and_leave_nothing(saved_model, tmp_path, command, args, match):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    code, out, err = command(
        "quantize", *(a.format(model=saved_model, tmp=tmp_path, empty=empty) for a in args)
    )
    assert code == 1
    assert match in err
    assert err.startswith("loopq: error: ")
    assert out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize("command_name", ["quantize", "collect"])
def test_a_disk_that_fills_up_leaves_nothing_half_written(saved_model, tmp_path, command, command_name):
    """The system refuses to let any file grow: an error that names the file, and no output folder."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        code, _, err = command(
            command_name, saved_model, "--out", tmp_path / "out", "--n-prompts", 4, "--seq-len", 24
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1, err
    assert f"cannot be written ({os.strerror(27)})" in err
    assert "Traceback" not in err
    left = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not [p for p in left if p.suffix == ".tmp" or p.name in ("manifest.json", "loopq.json")]
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_interrupt_says_where_progress_is_saved(saved_model, tmp_path, command, monkeypatch):
    def stop(self, tasks, total=None):
        raise KeyboardInterrupt

    monkeypatch.setattr("loopq.run.solver.Solver.run", stop)
    code, _, err = command("quantize", saved_model, "--out", tmp_path / "q", "--preset", "fast", *TINY)
    assert code == 130
    assert "nothing is saved: the same command starts anew" in err, "sums of less than a minute"
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    code, _, err = command("quantize", saved_model, "--out", tmp_path / "q", "--preset", "fast", *TINY)
    assert code == 130
    place = tmp_path / ".q.work"
    assert f"progress is saved in {place}: the same command resumes from there" in err
    assert place.is_dir()
    monkeypatch.undo()
    assert command("quantize", saved_model, "--out", tmp_path / "q", "--preset", "fast", *TINY)[0] == 0
    assert not place.exists()


def test_settings_come_from_a_checkpoint_and_options_change_them(saved_model, tmp_path, command):
    """Depth and seed too; the same command as the first then gives the same bytes."""
    asked = ("--preset", "paper", "--bits", 3, "--group-size", 16, "--n-steps", 2, "--seed", 3)
    assert (
        command(
            "quantize", saved_model, "--out", tmp_path / "a", *asked, "--layer", "*adapter*=>bits=8", *TINY
        )[0]
        == 0
    )
    assert command("quantize", saved_model, "--out", tmp_path / "b", "--like", tmp_path / "a", *TINY)[0] == 0
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "ab")
    assert first == second
    more = ("--like", tmp_path / "a", "--bits", 4, "--n-steps", 3, "--evaluate", "-", *TINY)
    code, text, _ = command("quantize", saved_model, "--out", tmp_path / "c", *more)
    assert code == 0
    assert "KL (nats)" in text
    settings = json.loads(command("inspect", tmp_path / "c", "--json")[1])["settings"]
    assert (settings["n_steps"], settings["seed"]) == (3, 3)
    assert settings["quantization"]["layer"]["grid"] == {
        "bits": 4,
        "group_size": 16,
        "symmetric": True,
        **{
            k: v
            for k, v in settings["quantization"]["layer"]["grid"].items()
            if k not in ("bits", "group_size", "symmetric")
        },
    }
    assert "model card" in text
    assert (tmp_path / "c" / "README.md").is_file()


@pytest.mark.parametrize("share", [(), ("--set", "random_tokens=0.2")])
def test_the_share_of_random_tokens_is_taken_from_a_checkpoint(share, saved_model, tmp_path, command):
    asked = ("--method", "gptq", "--group-size", 16, *TINY)
    for name, more in (
        ("a", share),
        ("b", ("--like", tmp_path / "a")),
        ("plain", ("--set", "random_tokens=0")),
    ):
        assert command("quantize", saved_model, "--out", tmp_path / name, *asked, *more)[0] == 0
    first, second, plain = ((tmp_path / n / "loopq.json").read_bytes() for n in ("a", "b", "plain"))
    assert first == second != plain


def test_settings_cannot_be_taken_from_a_model(saved_model, tmp_path, command):
    code, _, err = command("quantize", saved_model, "--out", tmp_path / "q", "--like", saved_model)
    assert code == 1
    assert "a model that is not quantized" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    ["--method gptq-cd", "--set steps=1: --layer *adapter*=>steps=first"],
)
def test_several_processes_write_what_one_writes(saved_model, tmp_path, command, settings):
    asked = f"quantize {saved_model} --group-size 16 --threads 1 {settings} {' '.join(TINY)} --out"
    assert command(*asked.split(), tmp_path / "one")[0] == 0
    ended = in_ranks(f"{asked} {tmp_path / 'two'}", 2)
    assert [code for code, _ in ended] == [0, 0], ended
    assert "read back and compared" in ended[0][1]
    assert digest(tmp_path / "two") == digest(tmp_path / "one")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"]


def test_what_several_processes_cannot_divide_is_refused(saved_model, tmp_path, command, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    asked = ("quantize", saved_model, "--out", tmp_path / "q", "--group-size", 16, *TINY)
    code, _, text = command(*asked, "--preset", "best")
    assert code == 2
    assert "which several processes together cannot: start one, or take preset fast" in text
    code, _, text = command(*asked, "--format", "gptq")
    assert code == 2
    assert "`export` it afterwards" in text
    assert list(tmp_path.iterdir()) == []
