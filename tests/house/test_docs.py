"""The pages show the truth: examples run, commands exist, and the tutorial prints the quoted output."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from benches.quality.peers import OURS
from benches.quality.peers_table import EVEN
from loopq.cli import main, parse, parser
from loopq.evaluation.stats import mcnemar_exact

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name / "README.md" for name in ("kernels", "examples")),
    ]
)
#: Examples that a test machine cannot run: (page, part of the example).
ELSEWHERE = {
    ("compressed-tensors.md", "register_checkpoint_conversion_mapping"): "a checkpoint of HRM-Text",
    (
        "interop.md",
        "import loopq.runtime.transformers",
    ): "a checkpoint of a model of transformers",
    ("adapter.md", "# my_loop.py"): "a process of its own; `test_howto` runs it",
    ("merged.md", ".py\n"): "files of the page; `test_howto` runs them",
    ("engine.md", "# tokens.py"): "a process of its own; `test_howto` runs it",
}
#: Examples that take too long for a quick test, by a part of their text.
LONG = (
    'loopq.quantize("huginn_small", out="Q", bits=4, group_size=32, n_prompts=8)',
    'for method in ("gptq-cd", "trellis"):',
    "found = loopq.diagnose",
    "for measured in loopq.evaluate",
    "in one go",
    "loaded.model.bfloat16()",
    "QuantLinear.from_layer(quantized)",
    "HrmTextForCausalLM(small)",
)
_DECIMAL = re.compile(r"\d+\.\d+(?:e[-+]?\d+)?")


def _blocks(kinds: str) -> list[tuple[Path, str]]:
    pattern = re.compile(rf"^ *```(?:{kinds})\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    return [(page, block) for page in PAGES for block in pattern.findall(page.read_text("utf-8"))]


def _examples() -> list[object]:
    examples = []
    for page, block in _blocks("python"):
        if not any(page.name == name and words in block for name, words in ELSEWHERE):
            marks = [pytest.mark.slow] if any(words in block for words in LONG) else []
            line = page.read_text("utf-8")[: page.read_text("utf-8").index(block)].count("\n")
            examples.append(pytest.param(block, id=f"{page.name}:{line}", marks=marks))
    return examples


def _commands() -> list[tuple[str, str]]:
    """Every `loopq` command on a page, without its comment; the tutorial's are run, the others read."""
    commands = []
    for page, block in _blocks("console|sh"):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            # In a console, what follows no prompt was printed; in a script every line is a command.
            if "$ " in block and not line.strip().startswith("$ "):
                continue
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            for _, command in itertools.groupby(words, lambda word: word == "&&"):
                name, *rest = command
                if name == "loopq":
                    commands.append((page.name, shlex.join(rest)))
    return commands


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.stem)
def test_script_of_examples_runs(script, folder):
    subprocess.run([sys.executable, script], check=True)


def test_the_page_of_settings_is_what_the_settings_declare():
    script = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    assert script["FILE"].read_text("utf-8") == script["page"](), "run python docs/settings.py"


@pytest.mark.parametrize("example", _examples())
def test_example_runs(example, folder):
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(textwrap.dedent(example), "example", "exec"), {"__name__": "example"})


@pytest.mark.parametrize(("page", "command"), sorted(set(_commands())))
def test_command_is_read(page, command):
    # MODEL, DIR and the like stand for names; an ellipsis in brackets is how a page says "and more of these".
    words = shlex.split(command.replace("[MODEL ...]", "MODEL"))
    if words[-1] in ("--help", "--help-all", "--version"):
        with pytest.raises(SystemExit) as stopped:
            parse(words)
        assert stopped.value.code == 0
    else:
        assert parse(words).run


def test_options_that_sentences_name_exist():
    (commands,) = parser()._subparsers._group_actions
    known = {name: set(sub._option_string_actions) for name, sub in commands.choices.items()}
    wrong, seen = [], 0
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for command in re.findall(r"`loopq ([a-z][^`]*)`", prose):
            name, *words = command.split()
            options = {w.partition("=")[0] for w in words if w.startswith("--")}
            seen += bool(options)
            # `loopq COMMAND` stands for any; what is wrong is a command or an option that there is not.
            if options - known.get(name, set()) or (name.islower() and name not in known):
                wrong.append(f"{page.name}: loopq {command}")
    assert not wrong
    assert seen > 20


@pytest.mark.slow
def test_the_tutorial_prints_what_it_shows(folder, capsys):
    page = ROOT / "docs" / "tutorial.md"
    checked = 0
    for block in re.findall(r"```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = entry.partition("\n")
            assert main(shlex.split(command)[1:]) == 0, command
            printed = capsys.readouterr().out
            for line in shown.splitlines():
                # `...` stands for lines left out; times and what the standard error says differ.
                if line.strip() != "..." and not line.startswith("loopq:"):
                    assert _same(line, printed), f"{command}\n{line!r} is not in\n{printed}"
                    checked += 1
    assert checked > 10


def _same(line: str, printed: str) -> bool:
    """Whether a line was printed: decimals within 2 %, since processors round otherwise, the rest as it stands."""

    def split(text: str) -> tuple[str, list[float]]:
        text = " ".join(text.split())
        return _DECIMAL.sub("#", text), [float(number) for number in _DECIMAL.findall(text)]

    words, numbers = split(line)
    others = map(split, printed.splitlines())
    return any(words == other and values == pytest.approx(numbers, rel=0.02) for other, values in others)


def test_lines_are_compared_by_their_numbers():
    assert _same("KL  0.00239 of 32", "a\nKL 0.00241 of 32")
    assert not _same("KL 0.00239 of 32", "KL 0.00289 of 32")
    assert not _same("KL 0.00239 of 32", "KL 0.00239 of 33")
    assert not _same("KL 0.00239 of 32", "KL -0.00239 of 32")


def test_each_statement_about_safety_names_a_test_that_exists():
    text = (ROOT / "docs" / "safety.md").read_text("utf-8")
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| statement"))
    ]
    assert len(rows) > 20
    for row in rows:
        named = re.search(r"\| `(tests/[\w/]+\.py)::(test_\w+)` \|$", row)
        assert named, f"no test: {row}"
        assert f"\ndef {named[2]}(" in (ROOT / named[1]).read_text("utf-8"), row


def test_default_has_more_right_answers_at_3_bits_on_every_task():
    scores = json.loads((ROOT / "benches" / "record" / "smollm2-peers-2026-11-27.json").read_text("utf-8"))[
        "scores"
    ]
    right = {(r["bits"], r["task"], r["variant"]): np.array(list(r["values"])) == "1" for r in scores}
    p_values = {}
    for bits, task in {(bits, task) for bits, task, _ in right if bits}:
        ours, theirs = (right[bits, task, v] for v in ("loopq default", "llm-compressor, imatrix_mse"))
        gained, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
        assert gained > lost
        p_values[bits, task] = mcnemar_exact(gained, lost)
    assert len(p_values) == 6
    three, four = ([p for (bits, _), p in p_values.items() if bits == b] for b in (3, 4))
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"on all three tasks (p at most {max(three):.2g})" in text
    assert f"no task tells loopq and llm-compressor apart (p at least {min(four):.1g})" in text
    ours, theirs = (
        [right[3, t, v] for t in ("lambada", "arc_easy")] for v in ("loopq default", "auto-round, best")
    )
    slow = [
        mcnemar_exact(int((a & ~b).sum()), int((b & ~a).sum())) for a, b in zip(ours, theirs, strict=True)
    ]
    assert f"and than auto-round on LAMBADA and ARC-easy (p at most {max(slow):.2g})" in text
    ours, theirs = (right[4, "lambada", v] for v in ("loopq default", "auto-round, best"))
    p_value = mcnemar_exact(int((ours & ~theirs).sum()), int((theirs & ~ours).sum()))
    assert f"LAMBADA alone tells loopq and auto-round apart there (p {p_value:.2g})" in text


def test_sentences_of_the_readme_have_the_figures_of_the_record():
    record = json.loads((ROOT / "benches" / "record" / "smollm2-peers-2026-11-27.json").read_text("utf-8"))
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    rows = {(r["variant"], r["bits"]): r for r in record["peers"] if r["draw"] == 0}
    kls = {b: {name: r["kl"] for (name, bits), r in rows.items() if bits == b} for b in (4, 3)}
    others = {b: {name: kl for name, kl in here.items() if name not in OURS} for b, here in kls.items()}
    ours, plain = (
        [f"{kls[bits][name] / min(others[bits].values()):.2f}" for bits in (4, 3)]
        for name in ("loopq default", EVEN)
    )
    assert f"is {ours[0]} of that at 4 bits and {ours[1]} at 3. " in text
    assert f"it is {plain[0]} and {plain[1]}." in text
    compressor = {b: min(kl for name, kl in here.items() if "llm" in name) for b, here in others.items()}
    ratios = [f"{kls[bits]['loopq default'] / compressor[bits]:.2f}" for bits in (4, 3)]
    assert f"Of llm-compressor's best setting loopq leaves {ratios[0]} and {ratios[1]}." in text
    for bits in (4, 3):
        other = {r["variant"]: r["kl"] for r in record["peers"] if r["draw"] == 1 and r["bits"] == bits}
        least = min(kl for name, kl in other.items() if "llm" in name)
        for name in ("loopq default", EVEN):
            assert abs(other[name] / least - kls[bits][name] / compressor[bits]) <= 0.02
    best = {b: min(here, key=here.__getitem__) for b, here in others.items()}
    assert all(name.startswith("auto-round") for name in best.values())
    four, three = (rows[best[b], b]["seconds"] / rows["loopq default", b]["seconds"] for b in (4, 3))
    assert f"auto-round, at {four:.1f} and {three:.1f} times loopq's CPU seconds." in text
    page = " ".join((ROOT / "docs" / "comparison.md").read_text("utf-8").split())
    second = {(r["variant"], r["bits"]): r["kl"] for r in record["peers"] if r["draw"] == 1}
    again = [
        f"{second['loopq default', b] / min(kl for (v, n), kl in second.items() if n == b and 'llm' in v):.2f}"
        for b in (4, 3)
    ]
    least = {b: min(here.values()) for b, here in others.items()}
    small, rotated = (kls[3][f"loopq {name}"] for name in ("small, inputs open", "default, hadamard"))
    for said in (
        f"leaves {ours[0]} and {ours[1]} of the KL of the best other tool",
        f"Even levels leave {plain[0]} and {plain[1]}.",
        f"`--set rotation=hadamard` ({rotated / least[3]:.2f}).",
        f"observer the default leaves {ratios[0]} and {ratios[1]}. [Another calibration",
        f"another-draw-of-calibration-text) gives {again[0]} and {again[1]}.",
        f"open inputs has {small / least[3]:.2f} of auto-round's KL at INT3,",
        f"and its three bits have {small / least[4]:.2f} of that of auto-round's four.",
        f"auto-round takes {four:.1f} times the CPU seconds of loopq's default at INT4, and {three:.1f} times at INT3.",
    ):
        assert said in page
    peer = rows["llm-compressor, mse", 3]["seconds"]
    times, even_times = (f"{rows[name, 3]['seconds'] / peer:.1f}" for name in ("loopq default", EVEN))
    assert (
        f"It takes {times} times the CPU seconds of llm-compressor with `mse`, and {even_times} times with"
        in text
    )
    iq4_nl = record["gguf"]["iq4_nl"]
    assert f"loopq has {iq4_nl['loopq']:.3f}." in text
    assert f"importance matrix has {iq4_nl['tool, importance']:.3f}." in text
    assert rows["loopq small, inputs open", 3]["kl"] < min(others[4].values()), "three bits on a trellis"
    error = {r["variant"]: r["kl"] for r in record["plbert"]}
    rtn, one, every = (error[f"{name}, paper"] for name in ("RTN", "GPTQ, one step", "GPTQ, trajectory"))
    best = min(kl for name, kl in error.items() if name.startswith("llm-compressor"))
    assert (
        f"rounding has an error of {rtn:.2f}. GPTQ has {one:.2f} from one step and {every:.2f} from all."
        in text
    )
    assert f"best of llm-compressor has {best:.3f}, loopq {error[EVEN]:.3f} with even levels." in text
    exl3 = {(r["model"], r["bits"]): r["kl"] for r in record["exl3"]}
    codes = {b: exl3["smollm2_loop", b] for b in (4, 3)}
    own = [f"{kls[b]['loopq small, inputs open'] / codes[b]:.2f}" for b in (4, 3)]
    share = {b: f"{codes[b] / kls[b]['loopq default']:.2f}" for b in (4, 3)}
    assert f"better than the default ({share[4]} of its KL at 4 bits, {share[3]} at 3)." in text
    assert (
        f"has {own[0]} and {own[1]} of EXL3's KL. Its three bits lose less than four bits of auto-round."
        in text
    )
    assert f"GPTQModel has {codes[4]:.3f} at 4 bits and {codes[3]:.3f} at 3." in text
    tiny = error["loopq small, inputs open"]
    assert f"`--preset small` has {tiny:.3f}, where EXL3 has {exl3['plbert', 3]:.3f}." in text
