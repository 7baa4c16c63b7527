"""The emulation must notice what it is there for: kernels with one barrier, wait or bound taken out."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cuda import emulation
from tests.support.cuda.cases import Case, make_problem, relative_l2, run
from tests.support.cuda.emulation import FLAGS, HOST, ROOT, EmulationError, compiler
from tests.support.marks import slow_unless

pytestmark = pytest.mark.kernels

MUTANTS = {
    "no wait for copies": ("copy_async_wait<kStages - 2>();", ";", "unwritten or in-flight"),
    "one copy too many in flight": (
        "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();", "in-flight",
    ),
    "no warp barrier before scales": (
        "warp_sync();\n                if (next.flat < s.end) fetch_next",
        "if (next.flat < s.end) fetch_next", "with no barrier between",
    ),
    "refill of the stage in use": ("slot == 0 ? kStages - 1 : slot - 1);", "slot);", "unwritten or in-flight"),
    "no barrier after staging x": (
        "stage_activations();\n        block_sync();", "stage_activations();", "with no barrier between",
    ),
    "no barrier before joining warps": (
        "stream(next);\n        block_sync();\n        let_next", "stream(next);\n        let_next", "unwritten",
    ),
    "x read beyond its end": ("k >= p.k_begin && k < p.k_end", "k >= p.k_begin", "outside memory"),
    "second half of the last pair not clamped": ("smaller(strip + 1, p.n / 16 - 1)", "(strip + 1)", "outside memory"),
    "a sum left out": (
        "for (int warp = first + 1; warp <= last; ++warp)", "for (int warp = first + 1; warp < last; ++warp)",
        "wrong result",
    ),
}  # fmt: skip


MANY_MUTANTS = {
    "no wait for copies": ("copy_async_wait<kStages - 2>();", ";", "unwritten or in-flight"),
    "one copy too many in flight": (
        "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();", "in-flight",
    ),
    "no barrier of a stage": (
        "copy_async_wait<kStages - 2>();\n            block_sync();", "copy_async_wait<kStages - 2>();", "",
    ),
    "refill of the stage in use": ("slot == 0 ? kStages - 1 : slot - 1;", "slot;", "unwritten or in-flight"),
    "x read beyond its end": ("k >= p.k_begin && k < p.k_end", "k >= p.k_begin", "outside memory"),
    "zeros beyond K left out": ("st_shared4(at, Vec4{0, 0, 0, 0});", ";", "unwritten"),
    "tokens beyond the last not clamped": (
        "smaller(me.token0 + row, p.m - 1)", "(me.token0 + row)", "outside memory",
    ),
    "strips beyond the last not clamped": (
        "smaller(me.strip0 + in_block, p.n / 16 - 1)", "(me.strip0 + in_block)", "outside memory",
    ),
    "groups end nowhere": ("if (kFold == 2 && group_ends)", "if (kFold == 2 && tile == end - 1)", "wrong result"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


def build(folder: Path, file: str, name: str, old: str, new: str) -> Path:
    """The emulation of a kernel with one text replaced, with the one variant that is needed."""
    source = (ROOT / "kernels" / file).read_text()
    assert source.count(old) == 1, f"the mutant {name!r} no longer applies"
    here = folder / f"{file} {name}".replace(" ", "_")
    host = here / HOST.relative_to(ROOT)
    host.mkdir(parents=True)
    shutil.copytree(ROOT / "kernels", here / "kernels")
    (here / "kernels" / file).write_text(source.replace(old, new))
    for path in HOST.glob("*"):
        (host / path.name).write_text(path.read_text())
    target = here / "mutant.so"
    options = [flag for flag in FLAGS if flag not in ("-Wall", "-Wextra", "-Werror", "-O1")]
    command = [compiler(), *options, "-w", "-O0", "-DLQ_HOST_ONE_VARIANT", "-o", str(target)]
    subprocess.run([*command, str(host / "harness.cpp")], check=True)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_unless(lambda n: n.startswith("x read"), MUTANTS))
def test_a_broken_kernel_is_noticed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(k=992, n=48, tokens=5, blocks=1, slices=1, warps=5, x_gap=0, stages=4)
    notice(build(folder, "w4a16_gemm.cu", name, *MUTANTS[name][:2]), MUTANTS[name][2], case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_unless(lambda n: n.startswith("x read"), MANY_MUTANTS))
def test_a_broken_kernel_of_many_tokens_is_noticed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With fewer tiles than stages no stage is filled twice.
    k = 96 if name.startswith("zeros") else 992
    case = Case(k=k, n=48, tokens=40, slices=1, x_gap=0, stages=4)
    notice(
        build(folder, "w4a16_tiled.cu", name, *MANY_MUTANTS[name][:2]),
        MANY_MUTANTS[name][2],
        case,
        monkeypatch,
    )


def notice(library: Path, message: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    lib = emulation.open_library(library)
    monkeypatch.setattr(emulation, "library", lambda token_tiles: lib)
    complaints = [complaint(replace(case, seed=seed)) for seed in range(4)]
    assert any(c is not None and message in c for c in complaints), complaints


def complaint(case: Case) -> str | None:
    """The emulation's verdict on a case: an error, "wrong result", or None if it found nothing."""
    problem = make_problem(case)
    try:
        result = run(problem)
    except EmulationError as error:
        return str(error)
    return None if relative_l2(result, problem.expected) < 1e-6 else "wrong result"
