"""Command lines and models as nobody should give them: each is refused in one line, or works."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import loopq
from loopq.cli import main, parser
from loopq.errors import LoopqError
from loopq.terminal.text import visible

from .counts import Counts, before
from .files import EVIL, changed_json, replace
from .runs import TINY

WORDS = [
    "", " ", "-1", "0", "1", "2", "3.25", "1e400", "nan", "inf", "-inf", "1e20", "99999999999999999999", "9" * 400, "٣",
    "none", "true", "maybe", "../x", "/", "/dev/null", "/dev/zero", "nowhere", ".", "\ud800", "a\nb", "x" * 5000,
    "0-1", "5-2", "first", "last", "all", "re:(", "re:(a+)+$", "[", "*", "*=>bits=8", "*=>bits=5", "*=>symmetric=maybe",
    "*=>x", "=>", "2,4", ",", "8G", "1B", "1M", "-1G", "cpu", "meta", "cuda:99", "cuda", "x:y:z", "hadamard:16",
    "hadamard:-1", "hadamard:99999999999", "%s", "{}", "$(x)", "balanced", "alpha=2", "alpha=nan",
    EVIL,
]  # fmt: skip
#: Bound on one command's use; beyond it something runs that should have been refused.
SECONDS = 120


class _Late(BaseException):
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """End what takes longer."""

    def late(number: int, frame: object) -> None:
        raise _Late

    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def command_lines(model: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Give options of every command values that they cannot have, and some that they can."""
    counts = Counts()
    commands = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    names = [n for n in commands if n not in ("demo", "bench", "reproduce")]
    for number in before(until, range(n_cases)):
        name = names[number % len(names)]
        with tempfile.TemporaryDirectory() as folder:
            argv = _line(name, commands[name], model, Path(folder), rng)
            code, text = _run(argv)
        kind = {0: "works", 1: "refused", 2: "wrong usage"}.get(code, f"exit code {code}")
        # Lines before the last are progress.
        bad = code not in (0, 1, 2) or "Traceback" in text or (code and len(text.splitlines()[-1]) > 2000)
        counts.add(kind, f"{argv}: {code}: {text[-400:]}" if bad else "")
    return counts


def _line(name: str, command, model: Path, folder: Path, rng: random.Random) -> list[str]:
    argv = [name]
    options = [
        a for a in command._actions if a.option_strings and a.dest not in ("help", "trust_remote_code")
    ]
    for action in command._actions:
        if not action.option_strings:
            argv.append(rng.choice([str(model), str(model), str(model), *WORDS[:24]]))
        elif action.required:
            argv += [action.option_strings[0], str(folder / "out")]
    if name in ("quantize", "collect", "evaluate", "diagnose"):
        argv += ["--n-prompts", "2", "--seq-len", "8", "--threads", "1"][: 4 if name == "evaluate" else 6]
    for action in rng.sample(options, min(len(options), rng.randint(1, 3))):
        argv.append(action.option_strings[0])
        if action.const is None:
            argv.append(rng.choice([*WORDS, *map(str, action.choices or ())]))
    return [a.replace("\0", "") for a in argv]


def _run(argv: list[str]) -> tuple[int, str]:
    text, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(out):
        try:
            with limited(SECONDS):
                code = main(argv)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except _Late:
            code = 124
        except BaseException as error:  # noqa: BLE001  # what is looked for
            return 70, f"Traceback: {type(error).__name__}: {error}"
    for said in (text.getvalue(), out.getvalue()):
        if (shown := visible(said)) != said or "\nforged" in said:
            return 71, f"a terminal would obey, or a line is forged: {shown}"
    return code, text.getvalue()


def models(model: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Change a model's config.json and its tensors' headers; give modules that are no use."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        for number in before(until, range(n_cases)):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(model, folder)
            _break(folder, number, rng)
            code, text = _run(f"quantize {folder} --out {name}/out {TINY} --method rtn".split())
            shutil.rmtree(Path(name) / "out", ignore_errors=True)
            wrong = f"{(folder / 'config.json').read_bytes()[:600]!r}: {code}: {text[-300:]}"
            kind = {0: "works", 1: "refused", 2: "refused"}.get(code, f"exit code {code}")
            counts.add(kind, "" if code in (0, 1, 2) else wrong)
    for make in MODULES:
        try:
            loopq.quantize(make(), [[1, 2, 3, 4], [5, 6, 7, 8]], method="rtn", group_size=8, threads=1)
            counts.add("modules: work")
        except LoopqError as error:
            # Where no loop is found there is a line for each weight.
            first, *more = str(error).splitlines()
            fine = all("has no loop" in first and line.startswith("  ") for line in more)
            counts.add("modules: refused", "" if fine else f"{make.__name__}: more than a line: {error}")
        except Exception as error:  # noqa: BLE001  # what is looked for
            counts.add("modules: tracebacks", f"{make.__name__}: {type(error).__name__}: {error}")
    return counts


def _break(folder: Path, number: int, rng: random.Random) -> None:
    config = folder / "config.json"
    if number % 3:
        text = config.read_text()
        for _ in range(rng.randint(1, 2)):
            text, data = changed_json(text, rng)
            if data is None:
                break
        replace(config, text.encode(errors="surrogatepass"))
        return
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if number % 2:
        length = int.from_bytes(content[:8], "little")
        text, _ = changed_json(content[8 : 8 + length].decode(), rng)
        header = text.encode(errors="surrogatepass")
        content = bytearray(len(header).to_bytes(8, "little") + header + content[8 + length :])
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    replace(weights, bytes(content))


class Loop(nn.Module):
    """A module that is called with ids and uses its core four times."""

    def __init__(self, core: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.core, self.head = (
            nn.Embedding(256, 16),
            core or nn.Linear(16, 16),
            nn.Linear(16, 256),
        )

    def forward(self, ids):
        x = self.embed(ids)
        for t in range(4):
            x = self.step(x, t)
        return self.head(x)

    def step(self, x, t):
        return x + torch.tanh(self.core(x))


def _with(method: str, function) -> type[Loop]:
    return type(method, (Loop,), {"step": function, "__name__": method})


def _raises(error: BaseException):
    def step(self, x, t):
        if t == 3:
            raise error
        return x + self.core(x)

    return step


def _zero() -> Loop:
    model = Loop()
    model.core.weight.data.zero_()
    return model


def _nan() -> Loop:
    model = Loop()
    model.core.weight.data[3, 4] = float("nan")
    return model


MODULES = [
    Loop,
    _zero,
    _nan,
    lambda: Loop(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))),
    lambda: Loop(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))),
    lambda: Loop(nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))),
    lambda: Loop(nn.LazyLinear(16)),
    lambda: Loop().to("meta"),
    lambda: Loop().half(),
    lambda: Loop().double(),
    lambda: Loop(nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 16))).train(),
    lambda: Loop(nn.Linear(16, 16, bias=False)).requires_grad_(False),
    lambda: Loop(nn.Bilinear(16, 16, 16)),
    lambda: Loop(nn.Conv1d(16, 16, 1)),
    lambda: Loop(nn.Identity()),
    nn.Identity,
    lambda: nn.Linear(4, 4),
    nn.Module,
    lambda: nn.DataParallel(Loop()),
    lambda: copy.deepcopy(Loop()),
    *(
        _with(type(e).__name__, _raises(e))
        for e in (ValueError("a\nb"), KeyError("x"), RuntimeError(), StopIteration())
    ),
    _with("shapes", lambda self, x, t: x @ torch.zeros(3, 3)),
    _with("infinite", lambda self, x, t: self.core(x) * float("inf")),
    _with("text", lambda self, x, t: "x"),
    _with("grows", lambda self, x, t: torch.cat([x, self.core(x)], 1)),
]
