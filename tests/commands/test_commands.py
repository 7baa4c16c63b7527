"""Properties of all commands: their options and their help."""

from __future__ import annotations

import functools
import re
import shutil
import signal

import pytest

from loopq.cli import main, parser
from loopq.commands import COMMANDS
from tests.soak.runs import AT_END, at_event, begin, finish
from tests.support.marks import slow_unless
from tests.support.runs import TINY, digest


def subparsers():
    """The parser of every command by its name."""
    return parser()._subparsers._group_actions[0].choices


def test_the_usage_of_every_command_is_what_it_cannot_do_without():
    usages = {name: " ".join(sub.format_usage().split()) for name, sub in subparsers().items()}
    assert usages["quantize"] == "usage: loopq quantize MODEL --out DIR [options]"
    assert usages["evaluate"] == "usage: loopq evaluate MODEL [DIR ...] [options]"
    assert usages["check"] == "usage: loopq check MODEL [options]"
    assert list(usages).index("merge") == list(usages).index("collect") + 1


def test_help_shows_common_options_with_their_defaults(command):
    code, text, _ = command("quantize", "--help")
    assert code == 0
    words = " ".join(text.split())
    assert "input columns that share a scale; -1: one scale per output row (default 128)" in words
    assert "act_order" not in text
    assert "--set NAME=VALUE give any setting by its name" in words
    assert "`loopq quantize --help-all` explains these options and" in text
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert 10 <= len(shown) <= 12
    assert shown[:3] == ["--out", "--for", "--preset"]
    assert len(text.splitlines()) <= 50, "it fits on a screen"


def test_help_all_shows_every_option_once_in_its_group(command):
    code, text, _ = command("quantize", "--help-all")
    assert code == 0
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    options = [a.option_strings[0] for a in subparsers()["quantize"]._actions if a.option_strings]
    assert sorted(shown) == sorted(o for o in options if o != "-h")
    assert len(shown) <= 45
    words = " ".join(text.split())
    assert "(default 128)" in words
    assert "method gptq-cd, trellis: --metric auto|inputs|loop" in words
    assert "explains them): symmetric, scale_dtype, scale_bits, steps" in words
    assert "how a size is divided between layers: --fit BUDGET" in words
    # Options that are off or come from the model have no default to show.
    assert "default None" not in text
    assert "default none" not in text


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_every_option_of_every_command_is_explained_in_one_way(name):
    for action in subparsers()[name]._actions:
        text = action.help
        assert text, action
        assert not text.endswith("."), text
        assert "`" not in text or text.count("`") % 2 == 0, text
        assert text[0].islower() or text[1].isupper(), text


def test_the_list_of_commands_has_one_line_each(command):
    code, text, _ = command("--help")
    assert code == 0
    listed = text.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(subparsers())
    assert text.startswith("usage: loopq COMMAND [options]")
    assert command("--version")[1].startswith("loopq ")


@pytest.fixture(scope="module")
def sums(saved_model, tmp_path_factory):
    """Two dumps of Hessians that can be merged."""
    place = tmp_path_factory.mktemp("sums")
    for seed in (0, 1):
        argv = ["collect", saved_model, "--out", place / str(seed), "--hessian", "--seed", seed, *TINY]
        assert main([str(a) for a in argv]) == 0
    return place


WRITERS = ("quantize", "measured", "solve", "export", "collect", "merge")


def writer(name, saved_model, sums, quantized):
    """The command line of a command that writes a folder, without its output."""
    return {
        "quantize": ("quantize", saved_model, "--preset", "fast", "--group-size", "16", *TINY),
        "measured": (
            "quantize",
            saved_model,
            "--method",
            "rtn",
            "--group-size",
            "16",
            "--evaluate",
            "-",
            *TINY,
        ),
        "solve": ("solve", sums / "0", "--method", "rtn"),
        "export": ("export", quantized, "--format", "gptq"),
        "collect": ("collect", saved_model, "--hessian", *TINY),
        "merge": ("merge", sums / "0", sums / "1"),
    }[name]


@pytest.mark.parametrize("name", WRITERS)
def test_an_output_that_cannot_be_is_one_line(
    name, command, saved_model, sums, quantized, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for out in ("", ".", "..", "loop", "loop/under", "a\0b"):
        code, _, err = command(*writer(name, saved_model, sums, quantized), "--out", out)
        assert code == (1 if out else 2)
        assert re.match("loopq[a-z ]*: error: ", err.splitlines()[-1])
    assert [p.name for p in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("measured", "solve"), WRITERS))
def test_a_kill_after_the_last_byte_is_no_end(name, saved_model, sums, quantized, tmp_path):
    argv = [str(a) for a in (*writer(name, saved_model, sums, quantized), "--out", tmp_path / "q")]
    log, count = tmp_path / "log", tmp_path / "count"

    def counted():
        seen = at_event(0)
        AT_END.append(lambda: count.write_text(str(len(seen))))

    # Here first, so that what is imported on the way is imported once.
    assert main(argv) == 0
    want = digest(tmp_path / "q")
    shutil.rmtree(tmp_path / "q")
    assert finish(begin(argv, log, counted)) == 0
    n = int(count.read_text())
    count.unlink()
    # The last operations are those on a whole output; `make soak` kills at each.
    for number in range(n - 2, n + 1):
        shutil.rmtree(tmp_path / "q")
        assert finish(begin(argv, log, functools.partial(at_event, number))) == -signal.SIGKILL
        assert finish(begin(argv, log)) == 0, log.read_text()
        assert digest(tmp_path / "q") == want
        assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "q"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("check nowhere --plan", "--plan: name a folder with the model's config.json"),
        ("collect {model} --out {out} --metric loop", "--metric loop goes with --hessian"),
        (
            "collect {model} --out {out} --hessian --set metric_draws=2",
            "--set metric_draws go with --metric loop",
        ),
        ("diagnose {model} --only ranks --quick", "--only and --quick both choose the sections"),
        ("diagnose", "name a model: MODEL, or --python"),
        ("diagnose {model} --python {file}:make", "MODEL and --python both name a model"),
        ("diagnose --python {out}:make", "give FILE.py:FUNCTION"),
        ("diagnose --python {file}", "give FILE.py:FUNCTION"),
        ("diagnose --python {file}:absent", "has no function 'absent'"),
        ("diagnose --python {file}:number", "returned int, which is neither a torch module nor an adapter"),
        ("solve {model} --out {out} --worker --shard 3", "'3': give K/N, as in 3/20"),
        ("run looped:{model} a", "write looped:MODEL[FIRST:LAST]xTIMES"),
    ],
)
def test_what_a_command_cannot_do_is_said_in_one_line(saved_model, tmp_path, command, line, why):
    (tmp_path / "own.py").write_text("def number():\n    return 3\n")
    words = {"model": saved_model, "out": tmp_path / "out", "file": tmp_path / "own.py"}
    code, _, err = command(*line.format(**words).split())
    assert code == 2
    assert why in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
