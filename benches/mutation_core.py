"""Do the tests see a wrong formula in the core: ``python -m benches.mutation_core`` changes it one place at a time.

The changes are those of cargo-mutants (``cargo install cargo-mutants``): another operator, a condition turned
round, a function that returns a constant. Each change is made in a copy of the last commit, and the extension
is built from it. The Python tests of the solver and its golden checksums run until the first fails, then the
core's own tests. A change that neither sees has survived. Results of a commit are kept line by line, so an
interrupted run resumes with the next change. The random order of the changes is fixed: any number of them is
a sample.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq.terminal.table import render

ROOT = Path(__file__).parents[1]
SOURCES = Path("rust/loopq-core/src")
#: The code that computes codes and scales.
FILES = ("proxy.rs", "gptq/*.rs", "grid/*.rs", "coordinate/*.rs", "factor/damped.rs", "factor/ordering.rs")
TESTS = ("tests/test_golden.py", "tests/quantizers", "tests/layers/test_grid.py", "tests/native")
#: They wait for signals or for memory, which no formula decides.
_WAITING = "ctrl_c or want_of_memory or ends_the_process or other_threads_run"
#: Minutes of Hessians and products, which none of FILES has a part in.
_ELSEWHERE = "every_row_type|cuts_threads|every_instruction_set"
#: Built once for each change: no optimisation across crates, and what did not change is kept.
_QUICK = {"LTO": "off", "CODEGEN_UNITS": "16", "INCREMENTAL": "true", "OPT_LEVEL": "2"}
_CARGO = ("cargo", "--config", "profile.release.package.loopq-core.codegen-units=16")
BUILD_SECONDS, TEST_SECONDS = 900, 240


@dataclass(frozen=True)
class Copy:
    """A copy of the last commit, where changes are made, built and tested."""

    folder: Path

    @classmethod
    def of(cls, folder: Path) -> Copy:
        """Make the copy, or bring it to the last commit."""
        if not folder.exists():
            subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        subprocess.run(["git", "-C", str(folder), "fetch", "-q", "origin", "HEAD"], check=True)
        subprocess.run(["git", "-C", str(folder), "reset", "-q", "--hard", "FETCH_HEAD"], check=True)
        return cls(folder)

    @property
    def commit(self) -> str:
        """The commit that is copied: another one has other lines, and other tests."""
        command = ["git", "-C", str(self.folder), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def run(self, *command: str, seconds: int) -> int | None:
        """Run a command with all that it starts; return its exit status, None where it takes too long."""
        env = os.environ | {f"CARGO_PROFILE_RELEASE_{k}": v for k, v in _QUICK.items()}
        env |= {"CARGO_TARGET_DIR": str(self.folder / "target"), "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"PYTHONPATH": f"{self.folder / 'python'}{os.pathsep}{self.folder}", "PROPTEST_CASES": "64"}
        nowhere = subprocess.DEVNULL
        with subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=nowhere, stderr=nowhere, start_new_session=True
        ) as process:
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None

    def build(self) -> bool:
        """Build the extension, and put it where Python finds it."""
        if self.run(*_CARGO, "build", "--release", "-q", "-p", "loopq-py", seconds=BUILD_SECONDS) != 0:
            return False
        package = self.folder / "python" / "loopq"
        shutil.copy(self.folder / "target" / "release" / "lib_native.so", package / "_native.part")
        # A process that still has the old one keeps it.
        (package / "_native.part").replace(package / "_native.abi3.so")
        return True

    def seen(self) -> str:
        """The tests that fail: "python", "core", or "survived" if all pass."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        options += ["-k", f"not ({_WAITING})"]
        if self.run(sys.executable, "-m", "pytest", *options, *TESTS, seconds=TEST_SECONDS) != 0:
            return "python"
        core = [*_CARGO, "nextest", "run", "-p", "loopq-core", "--release", "--lib", "--tests"]
        passed = self.run(*core, "-E", f"not test(/{_ELSEWHERE}/)", seconds=BUILD_SECONDS) == 0
        return "survived" if passed else "core"

    def judge(self, mutant: dict[str, Any]) -> str:
        """Make a change, see which tests fail, and take it back."""
        path = self.folder / mutant["file"]
        before = path.read_bytes()
        subprocess.run(["patch", "-s", str(path)], input=mutant["diff"], text=True, check=True)
        try:
            return self.seen() if self.build() else "does not compile"
        finally:
            path.write_bytes(before)


def mutants(copy: Copy) -> list[dict[str, Any]]:
    """Every change of FILES, in a random order that is always the same."""
    chosen = [part for file in FILES for part in ("-f", str(SOURCES / file))]
    command = ["cargo", "mutants", "--list", "--json", "--diff", "--package", "loopq-core", *chosen]
    done = subprocess.run(command, cwd=copy.folder, capture_output=True, text=True, check=True)
    changes: list[dict[str, Any]] = json.loads(done.stdout)
    random.Random(0).shuffle(changes)
    return changes


def main() -> None:
    """Try changes, print what survived, and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="changes that are tried (default: all, a day of one core)"
    )
    parser.add_argument("--work", type=Path, default=ROOT / ".cache" / "mutation-core")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    copy = Copy.of(args.work / "copy")
    if not copy.build():
        raise SystemExit(f"{copy.folder}: the extension does not build as it is")
    if (failed := copy.seen()) != "survived":
        raise SystemExit(f"{copy.folder}: tests fail as it is ({failed}); the core's need cargo-nextest")
    results = args.work / f"results-{copy.commit[:12]}.jsonl"
    lines = results.read_text("utf-8").splitlines() if results.exists() else []
    known = {entry["name"]: entry["result"] for entry in map(json.loads, lines)}
    counts: dict[str, Counter[str]] = {}
    for mutant in mutants(copy)[: args.sample]:
        name = mutant["name"]
        if name not in known:
            known[name] = copy.judge(mutant)
            with results.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"name": name, "result": known[name]}) + "\n")
        counts.setdefault(str(Path(mutant["file"]).relative_to(SOURCES)), Counter())[known[name]] += 1
        if known[name] == "survived":
            print(name, flush=True)
    columns = ("python", "core", "survived", "does not compile")
    rows = [(file, *(entry[c] for c in columns)) for file, entry in sorted(counts.items())]
    print(
        render(("file", "seen by Python tests", "by the core's alone", "survived", "does not compile"), rows)
    )


if __name__ == "__main__":
    main()
