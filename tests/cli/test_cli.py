"""The command line as a user meets it: what it prints, what it leaves, how it fails."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from loopq.cli import main, parser
from loopq.commands import COMMANDS, Command
from loopq.commands.output import measurement_table, spans
from loopq.progress import Line

TINY = ["--n-prompts", "6", "--seq-len", "24", "--batch-size", "2"]


@pytest.fixture
def model(tiny_folder):
    return str(tiny_folder)


def run(capsys, *args):
    """Run a command; return its exit code, output and errors."""
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def test_quantize_evaluate_inspect(model, tmp_path, capsys):
    out = tmp_path / "q"
    code, text, err = run(capsys, "quantize", model, "--out", out, "--bits", "3", "--group-size", "16", *TINY)
    assert code == 0
    assert "9 layers, 3 steps: about" in err
    assert "transformer.core_block.1.mlp.proj.weight" in text
    assert "read back and compared" in text
    assert "0-2" in text
    for line in (out / "report.jsonl").read_text().splitlines():
        report = json.loads(line)
        assert report["method_asked"] == report["method_done"] == "gptq"
        assert report["proxy"] < report["proxy_rtn"]
        assert report["n_rows"] == 6 * 24 * 3
        assert 1 <= report["rank"] <= report["shape"][1]
    code, text, _ = run(
        capsys, "evaluate", model, out, "--n-prompts", "4", "--seq-len", "24", "--n-seeds", "2", "--json"
    )
    reference, quantized = json.loads(text)
    assert code == 0
    assert reference["kl"] == 0.0
    assert quantized["kl"] > 0.0
    assert quantized["n_seeds"] == 2
    assert abs(quantized["bits_per_byte"] - reference["bits_per_byte"]) < 0.1
    code, text, _ = run(capsys, "inspect", out)
    assert code == 0
    assert "INT3" in text
    assert json.loads(run(capsys, "inspect", out, "--json")[1])["settings"]["system"] == "huginn"


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_quantize_writes_the_format_asked_for(model, tmp_path, capsys, form):
    out = tmp_path / "q"
    args = ("quantize", model, "--out", out, "--bits", "4", "--group-size", "16", "--format", form, *TINY)
    code, text, err = run(capsys, *args)
    assert code == 0, err
    assert "read back from disk: 9 layers equal, number by number" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q", "tiny-model"]
    code, text, _ = run(capsys, "inspect", out)
    assert code == 0
    assert f"format {form}" in text
    assert run(capsys, *args)[0] == 1


def test_collect_solve_merge(model, tmp_path, capsys):
    dump = tmp_path / "dump"
    code, text, err = run(capsys, "collect", model, "--out", dump, *TINY)
    assert code == 0
    assert "about 0.6 MiB of rows for 144 tokens" in err
    assert "rows dump of system huginn, 3 steps" in text
    assert run(capsys, "solve", dump, "--out", tmp_path / "s", "--steps", "1:")[0] == 0
    assert "1-2" in run(capsys, "inspect", tmp_path / "s")[1]
    for seed in (0, 1):
        part = tmp_path / f"part{seed}"
        assert run(capsys, "collect", model, "--out", part, "--hessian", "--seed", seed, *TINY)[0] == 0
    code, text, _ = run(capsys, "merge", tmp_path / "part0", tmp_path / "part1", "--out", tmp_path / "both")
    assert code == 0
    assert "12 prompts, 288 tokens from merged" in text
    code, text, _ = run(
        capsys, "solve", tmp_path / "both", "--out", tmp_path / "m", "--layer", "*adapter*=>bits=8"
    )
    assert code == 0
    assert "INT8" in text


@pytest.mark.parametrize(
    ("args", "code", "match"),
    [
        (["quantize", "nowhere", "--out", "{tmp}/o"], 2, "no model 'nowhere'"),
        (
            ["quantize", "{model}", "--out", "{tmp}/o", "--bits", "5"],
            2,
            "bits must be one of 2, 3, 4, 8; got 5",
        ),
        (["quantize", "{model}", "--out", "{tmp}/o", "--group-size", "0"], 2, "group_size must be -1"),
        (["quantize", "{model}", "--out", "{tmp}/o", "--steps", "7"], 2, "the rollout has 3 steps, 0 to 2"),
        (["quantize", "{model}", "--out", "{tmp}/o", "--method", "gptk"], 2, "did you mean gptq"),
        (["quantize", "{model}", "--out", "{tmp}/o", "--exclude", "zzz"], 2, "matches no shared parameter"),
        (["quantize", "{model}", "--out", "{tmp}/o", "--n-steps", "0"], 2, "n_steps must be at least 1"),
        (
            ["quantize", "{model}", "--out", "{tmp}/o", "--calibration", "{empty}"],
            1,
            "0 tokens make no window",
        ),
        (["quantize", "{model}", "--out", "{tmp}/o", "--calibration", "{tmp}/none.txt"], 1, "cannot be read"),
        (["solve", "{tmp}", "--out", "{tmp}/o"], 1, "not a dump"),
        (["inspect", "{tmp}"], 1, "neither a checkpoint"),
        (["evaluate", "{model}", "{tmp}"], 1, "no checkpoint: neither loopq.json nor config.json"),
        (["merge", "{tmp}", "--out", "{tmp}/o"], 2, "at least two parts"),
        (["evaluate", "{model}", "{tmp}/none"], 1, "none: no such folder"),
        (["inspect", "{empty}"], 1, "a file, not a folder"),
        (["solve", "{tmp}/none", "--out", "{tmp}/o"], 1, "none: no such folder"),
        (["quantize", "{empty}", "--out", "{tmp}/o"], 2, "a file; name the folder"),
        # Refused before the model is looked for.
        (["quantize", "nowhere", "--out", "{empty}"], 1, "a file stands there"),
        (["quantize", "nowhere", "--out", "{empty}/o"], 1, "is a file, so that no folder can be made in it"),
        (["quantize", "nowhere", "--out", "{tmp}/o", "--bits", "5"], 2, "bits must be one of"),
        (
            ["quantize", "nowhere", "--out", "{tmp}/o", "--method", "gptk"],
            2,
            "(did you mean gptq?); known: awq",
        ),
        (["diagnose", "nowhere", "--html", "{tmp}"], 2, "is a folder; name a file"),
        (["diagnose", "nowhere", "--json", "{empty}/o"], 2, "no folder that can be written to"),
        (["diagnose", "nowhere", "--work", "{empty}/o"], 2, "no folder that can be written to"),
        (
            ["reproduce", "main-table", "nowhere", "--work", "{empty}/o"],
            2,
            "no folder that can be written to",
        ),
        (["reproduce", "main-table", "nowhere", "--out", "{empty}"], 2, "no folder that can be written to"),
        (["demo", "--html", "{empty}/o"], 2, "no folder that can be written to"),
        # Options that nothing would read.
        (
            ["quantize", "nowhere", "--out", "{tmp}/o", "--preset", "best", "--act-order"],
            2,
            "goes with --method gptq",
        ),
        (
            ["quantize", "nowhere", "--out", "{tmp}/o", "--method", "rtn", "--precision", "float32"],
            2,
            "goes with",
        ),
        (["quantize", "nowhere", "--out", "{tmp}/o", "--sweeps", "2"], 2, "go with --inputs asymmetric"),
        (["quantize", "nowhere", "--out", "{tmp}/o", "--widths", "3,4"], 2, "go with --allocate"),
        (
            ["quantize", "nowhere", "--out", "{tmp}/o", "--held-out", "3"],
            2,
            "goes with --tune or --step-weights",
        ),
        (
            ["quantize", "{model}", "--out", "{tmp}/o", "--n-prompts", "0"],
            2,
            "n_prompts must be at least 1; got 0",
        ),
        (
            ["quantize", "{model}", "--out", "{tmp}/o", "--memory", "1K"],
            2,
            "above the limit of 0.00 MiB: raise --memory",
        ),
        (["evaluate", "{model}", "{tmp}/none", "--n-seeds", "0"], 2, "--n-seeds must be at least 1"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(model, tmp_path, capsys, args, code, match):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    before = sorted(tmp_path.rglob("*"))
    got, out, err = run(capsys, *(a.format(model=model, tmp=tmp_path, empty=empty) for a in args))
    assert got == code
    assert match in err
    assert "loopq: error: " in err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_real_kill_loses_nothing_that_was_written(model, tmp_path):
    """SIGKILL during collection; the same command then ends with the bytes of an unbroken run."""
    args = [sys.executable, "-m", "loopq", "collect", model, "--n-prompts", "60", "--seq-len", "64",
            "--batch-size", "1", "--shard-batches", "2", "--out"]  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*args, whole], check=True, capture_output=True, env=os.environ)
    process = subprocess.Popen(
        [*args, killed], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=os.environ
    )
    deadline = time.monotonic() + 60
    while not (killed / "shards" / "00003.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "manifest.json").exists()
    subprocess.run([*args, killed], check=True, capture_output=True, env=os.environ)
    for path in whole.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (killed / path.relative_to(whole)).read_bytes()


def test_interrupt_has_its_own_code(monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    found = COMMANDS.get("inspect")
    monkeypatch.setitem(COMMANDS._entries, "inspect", Command(found.help, found.add, stop, found.order))
    assert main(["inspect", "x"]) == 130
    assert "nothing is kept" in capsys.readouterr().err


def test_interrupt_says_where_what_is_done_is_kept(model, tmp_path, capsys, monkeypatch):
    def stop(self, tasks, total=None):
        raise KeyboardInterrupt

    monkeypatch.setattr("loopq.quantizers.solve.Solver.run", stop)
    code, _, err = run(capsys, "quantize", model, "--out", tmp_path / "q", *TINY)
    assert code == 130
    place = tmp_path / ".q.work"
    assert f"kept in {place}: the same command goes on from there" in err
    assert place.is_dir()
    monkeypatch.undo()
    assert run(capsys, "quantize", model, "--out", tmp_path / "q", *TINY)[0] == 0
    assert not place.exists()


@pytest.mark.parametrize(
    "args",
    [["quantize", "nowhere", "--out"], ["merge", "a", "b", "--out"], ["diagnose", "nowhere", "--html"]],
)
def test_a_place_that_cannot_be_written_is_said_before_any_work(args, tmp_path, capsys, monkeypatch):
    """As on a read-only file system; whoever runs the tests may be allowed to write everywhere."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    code, _, err = run(capsys, *args, tmp_path / "new" / "o")
    assert code in (1, 2)
    assert str(tmp_path) in err
    assert "name another" in err
    assert not (tmp_path / "new").exists()


def test_an_error_of_the_system_is_one_line_too(capsys, monkeypatch):
    def fail(args):
        raise PermissionError(13, "Permission denied", "/some/file")

    found = COMMANDS.get("inspect")
    monkeypatch.setitem(COMMANDS._entries, "inspect", Command(found.help, found.add, fail, found.order))
    assert run(capsys, "inspect", "x") == (1, "", "loopq: error: /some/file: Permission denied\n")


@pytest.mark.parametrize(
    "args",
    [
        ["--threads", "-1"],
        ["--allocate", "many"],
        ["--widths", "3,x"],
        ["--layer", "bits=8"],
        ["--bits", "x"],
    ],
)
def test_wrong_usage_is_one_line_that_names_the_option(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["quantize", "m", "--out", "o", *args])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.count("\n") == 1
    assert f"argument {args[0]}" in err
    assert "`loopq quantize --help` lists the options" in err


def test_the_usage_of_every_command_is_what_it_cannot_do_without():
    subs = parser()._subparsers._group_actions[0].choices
    usages = {name: " ".join(sub.format_usage().split()) for name, sub in subs.items()}
    assert usages["quantize"] == "usage: loopq quantize MODEL --out DIR [options]"
    assert usages["evaluate"] == "usage: loopq evaluate MODEL DIR [DIR ...] [options]"
    assert usages["reproduce"] == "usage: loopq reproduce {main-table} [MODEL ...] [options]"
    assert usages["systems"] == "usage: loopq systems"
    assert list(usages).index("merge") == list(usages).index("collect") + 1


def test_memory_and_overrides_are_read():
    args = parser().parse_args(
        ["quantize", "m", "--out", "o", "--memory", "1.5G", "--layer", "*a*=>bits=8,steps=1:,method=rtn"]
    )
    assert args.memory == 1.5 * 2**30
    assert args.layer[0].changes == {"bits": 8, "steps": "1:", "method": "rtn"}
    for bad in (
        ["--memory", "much"],
        ["--layer", "bits=8"],
        ["--layer", "*=>bits"],
        ["--layer", "*=>colour=3"],
    ):
        with pytest.raises(SystemExit) as stop:
            parser().parse_args(["quantize", "m", "--out", "o", *bad])
        assert stop.value.code == 2


@pytest.mark.parametrize(
    ("steps", "text"), [([], "-"), ([0], "0"), ([0, 1, 2], "0-2"), ([1, 3, 4, 7], "1,3-4,7")]
)
def test_spans(steps, text):
    assert spans(steps) == text


def test_help_prints_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default 128)" in text
    assert "all | first | 0:8 | 31 | 1:" in text


@pytest.mark.parametrize("command", ["quantize", "collect"])
def test_a_disk_that_fills_up_leaves_nothing_half_written(model, tmp_path, command):
    """The system refuses to let any file grow: an error that names the file, and no output folder."""
    code = (
        "import resource, sys\n"
        "from loopq.cli import main\n"
        "import loopq.systems.load, torch\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"sys.exit(main([{command!r}, {model!r}, '--out', {str(tmp_path / 'out')!r}, '--n-prompts', '4', "
        "'--seq-len', '24']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be written (File too large)" in done.stderr
    assert "Traceback" not in done.stderr
    left = [p for p in tmp_path.rglob("*") if p.is_file() and "tiny-model" not in p.parts]
    assert not [p for p in left if p.suffix == ".tmp" or p.name in ("manifest.json", "loopq.json")]
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_systems_and_check(model, capsys):
    code, text, _ = run(capsys, "systems")
    assert code == 0
    assert "Huginn-3.5B: 17" in text
    code, text, _ = run(capsys, "check", model)
    assert code == 0
    assert "3 calls of each weight, as declared" in text
    assert "FAILS" not in text
    assert text.endswith("loopq fits this model\n")


def test_check_casts_and_prints_json(model, capsys):
    code, text, err = run(capsys, "check", model, "--dtype", "bfloat16", "--n-steps", "2", "--json")
    assert code == 0, err
    found = json.loads(text)
    assert found["ok"] is True
    assert (found["system"], found["n_steps"], found["load"]["dtype"]) == ("huginn", 2, "bfloat16")
    assert {v["check"]: v["ok"] for v in found["verdicts"]}["single steps"] is True


def test_check_says_what_does_not_fit(model, capsys, monkeypatch):
    from loopq.systems import SYSTEMS

    cls = SYSTEMS.get("huginn")
    plain = cls.shared_parameters
    monkeypatch.setattr(cls, "shared_parameters", lambda self, n: plain(self, n)[1:])
    code, text, _ = run(capsys, "check", model)
    assert code == 1
    assert "loopq does not fit this model: nothing forgotten" in text
    assert json.loads(run(capsys, "check", model, "--json")[1])["ok"] is False


def test_a_device_that_is_not_there_is_said(model, capsys):
    code, _, err = run(capsys, "check", model, "--device", "nonsense")
    assert code == 2
    assert "device 'nonsense' cannot be used here" in err
    assert len(err.splitlines()) == 1


def test_pickles_are_read_only_when_allowed(tmp_path, capsys):
    import torch
    from transformers import AlbertConfig, AlbertModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = AlbertModel(AlbertConfig(vocab_size=64, embedding_size=16, **sizes))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    code, _, err = run(capsys, "check", tmp_path)
    assert code == 1
    assert "allow them with --allow-pickle" in err
    code, text, err = run(capsys, "check", tmp_path, "--allow-pickle")
    assert code == 0, err
    assert "system albert, 3 steps" in text


def test_diagnose_a_model_and_a_dump(model, tmp_path, capsys):
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    args = (
        "--only",
        "ranks,ablation,jacobian",
        "--html",
        page,
        "--json",
        data,
        "--n-prompts",
        "2",
        "--seq-len",
        "24",
    )
    code, text, err = run(capsys, "diagnose", model, *args)
    assert code == 0, err
    assert "transformer.adapter.weight: " in text
    assert "1 of 9 layers feedback-exposed" in text
    assert "maps meet the acceptance rules" in text
    assert "largest relative residual" in text
    assert json.loads(data.read_text())["format"] == "loopq-diagnosis"
    html = page.read_text()
    assert html.lstrip().lower().startswith("<!doctype html>")
    assert "<svg" in html
    dump = tmp_path / "dump"
    assert run(capsys, "collect", model, "--out", dump, "--hessian", "--per-step", *TINY)[0] == 0
    code, text, _ = run(capsys, "diagnose", dump)
    assert code == 0
    assert "not available: injection" in text
    assert run(capsys, "diagnose", dump, "--quick")[0] == 2
    assert run(capsys, "diagnose", model, "--only", "pictures")[0] == 2


def test_the_best_preset_and_the_hint_that_leads_to_it(model, tmp_path, capsys):
    code, _, err = run(capsys, "quantize", model, "--out", tmp_path / "plain", *TINY)
    assert code == 0
    assert "hint: --preset best" in err
    code, text, err = run(capsys, "quantize", model, "--out", tmp_path / "best", "--preset", "best", *TINY)
    assert code == 0
    assert "of this 24 gradients for the loop metric" in err
    assert "hint" not in err
    layer = json.loads(run(capsys, "inspect", tmp_path / "best", "--json")[1])["settings"]["quantization"][
        "layer"
    ]
    assert (layer["method"], layer["metric"], layer["damping_kind"]) == ("full", "loop", "diagonal")
    said = run(capsys, "inspect", tmp_path / "best")[1]
    assert "metric loop" in said
    assert "6 prompts, 144 tokens of embedded calibration text" in said
    out = tmp_path / "less"
    code, text, _ = run(
        capsys, "quantize", model, "--out", out, "--preset", "best", "--metric", "inputs", "--layer",
        "*adapter*=>method=gptq", "--precision", "float32", *TINY,
    )  # fmt: skip
    assert code == 0
    assert "gptq" in text


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_evaluate_measures_what_export_wrote_and_says_on_what(model, tmp_path, capsys, form):
    args = ("--bits", "4", "--group-size", "16", *TINY)
    assert run(capsys, "quantize", model, "--out", tmp_path / "q", *args)[0] == 0
    assert run(capsys, "export", tmp_path / "q", "--out", tmp_path / "e", "--format", form)[0] == 0
    measure = ("evaluate", model, tmp_path / "q", tmp_path / "e", "--n-prompts", "4", "--seq-len", "24")
    code, text, _ = run(capsys, *measure)
    assert code == 0
    assert text.startswith(
        "4 prompts, 96 tokens of embedded evaluation text, 3 steps, initial states of each: 1"
    )
    full, native, foreign = json.loads(run(capsys, *measure, "--json")[1])
    assert native["kl"] == foreign["kl"] > 0
    assert native["kl_95"][0] <= native["kl"] <= native["kl_95"][1]
    assert native["n_bytes"] < full["n_bytes"] == 4 * sum(p.numel() for p in _parameters(model))
    assert f"[{native['kl_95'][0]:.5f}" in text or f"[{native['kl_95'][0]:.2e}" in text


def _parameters(model):
    from loopq.systems.load import load_model

    return load_model(model).model.parameters()


def test_small_divergences_are_not_shown_as_none():
    rows = [{"name": n, "output": "logits", "kl": kl, "agreement": 1.0, "perplexity": 2.0, "bits_per_byte": None}
            for n, kl in (("full precision", 0.0), ("small", 1.234e-6), ("usual", 0.01234))]  # fmt: skip
    lines = measurement_table(rows).splitlines()[2:]
    assert [line.split()[-5 if "full" not in line else 2] for line in lines] == [
        "0.00000",
        "1.23e-06",
        "0.01234",
    ]


def test_export_without_torch_checks_the_numbers_and_says_what_it_did_not(model, tmp_path, capsys):
    assert run(capsys, "quantize", model, "--out", tmp_path / "q", "--group-size", "16", *TINY)[0] == 0
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from loopq.cli import main\n"
        f"sys.exit(main(['export', {str(tmp_path / 'q')!r}, '--out', {str(tmp_path / 'e')!r}, '--format', 'gptq']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "9 layers equal, number by number" in done.stdout
    assert "logits not compared: this needs torch" in done.stdout


def test_progress_in_a_log_shows_itself_now_and_then():
    log = io.StringIO()
    line = Line(log, log_every=0.0)
    line.start("collect", 3, "prompts")
    for _ in range(3):
        line.advance()
    line.stop()
    shown = log.getvalue().splitlines()
    assert [part.split("] ")[1].split(",")[0] for part in shown] == [
        "1/3 prompts",
        "2/3 prompts",
        "3/3 prompts",
    ]
    log = io.StringIO()
    line = Line(log)
    line.start("collect", 3, "prompts")
    line.advance(3)
    line.stop()
    assert len(log.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("set_to", "seen"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_without_spinning_unless_the_user_says_otherwise(set_to, seen):
    """What torch's threads do while they wait is read from the environment when torch is loaded, so not before."""
    code = (
        "import os, sys\n"
        "from loopq.cli import main\n"
        "assert 'torch' not in sys.modules\n"
        "main(['systems'])\n"
        "print(os.environ['OMP_WAIT_POLICY'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if set_to:
        environment["OMP_WAIT_POLICY"] = set_to
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == seen
