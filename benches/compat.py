"""Lowest and highest versions that loopq declares, on every Python that is there: `python -m benches.compat`.

For each interpreter a wheel of loopq is installed twice: with the lowest and with the highest versions that
its requirements allow and that have binary packages. The tests of TESTS run on both. The record goes to
`benches/record/compat-DATE.md`. uv resolves and installs (it is fetched into `.cache`): it knows "lowest".
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / ".cache" / "compat"
#: Recorded bits of the core, every adapter on a small model, the Python interface, loading by transformers.
TESTS = (
    "tests/native/test_unchanged.py",
    "tests/systems",
    "tests/test_api.py",
    "tests/runtime/test_transformers.py",
)
TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.112", "jsonschema>=4.23")
SHOWN = ("numpy", "torch", "transformers", "safetensors", "scipy")
MINORS = (11, 12, 13, 14)
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def requirements() -> list[str]:
    """Return what `loopq[hf]` requires, as `pyproject.toml` declares it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted, extras = list(project["dependencies"]), ["hf"]
    while extras:
        for line in project["optional-dependencies"][extras.pop()]:
            inner = re.fullmatch(r"loopq\[(\w+)\]", line)
            if inner:
                extras.append(inner[1])
            else:
                wanted.append(line)
    return wanted


def interpreters(given: Sequence[str]) -> dict[str, str]:
    """Return the command of each installed Python by version: the given ones, else `python3.N`, with those of
    pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    commands = list(given)
    if not commands:
        for minor in MINORS:
            candidates = [*sorted(pyenv.glob(f"3.{minor}.*/bin/python")), shutil.which(f"python3.{minor}")]
            commands += [str(command) for command in candidates if command][:1]
    return {
        _run([command, "-c", "import platform; print(platform.python_version())"]).strip(): command
        for command in commands
    }


def _run(command: Sequence[object], **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return str(done.stdout)


def install(python: str, resolution: str, wheel: Path, folder: Path) -> dict[str, str]:
    """Install a wheel and what it requires into a folder; return the versions."""
    shutil.rmtree(folder, ignore_errors=True)
    uv = [WORK / "uv" / "bin" / "uv", "pip", "install", "-q", "--python", python, "--target", folder]
    _run([*uv, "--only-binary", ":all:", "--resolution", resolution, *requirements(), *TOOLS])
    _run([*uv, "--no-deps", wheel])
    names = {path.name.split("-")[0].lower(): path.name.split("-")[1] for path in folder.glob("*.dist-info")}
    return {name: names[name].removesuffix(".dist") for name in SHOWN}


def test(python: str, folder: Path, log: Path) -> str:
    """Run the tests against a folder and return pytest's counts; what it printed goes into `log`."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    # Warnings of a version that is years old or days old are no failure of loopq.
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "-m",
        "not slow",
        *TESTS,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    log.write_text(done.stdout + done.stderr, "utf-8")
    counts = _COUNTS.findall(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else []
    return ", ".join(" ".join(count) for count in counts) or f"exit code {done.returncode}"


def main() -> int:
    """Try every pair of an interpreter and a resolution, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="wheel of this machine")
    parser.add_argument(
        "--python", nargs="*", default=(), metavar="COMMAND", help="interpreters (default: those found)"
    )
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if not (WORK / "uv" / "bin" / "uv").exists():
        _run([sys.executable, "-m", "pip", "install", "-q", "--target", WORK / "uv", "uv"])
    today = datetime.date.today().isoformat()
    lines = [f"| Python | versions | {' | '.join(SHOWN)} | tests |", "| --- " * (len(SHOWN) + 3) + "|"]
    print("\n".join(lines), flush=True)
    for version, python in interpreters(args.python).items():
        for resolution in ("lowest-direct", "highest"):
            folder = WORK / "site"
            versions = install(python, resolution, args.wheel.resolve(), folder)
            result = test(python, folder, WORK / f"{version}-{resolution}.log")
            cells = (version, resolution.split("-")[0], *versions.values(), result)
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    text = (
        f"# Versions, {today}\n\n`make compat`: {', '.join(f'`{name}`' for name in TESTS)}\n\n"
        + "\n".join(lines)
        + "\n"
    )
    (ROOT / "benches" / "record" / f"compat-{today}.md").write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
