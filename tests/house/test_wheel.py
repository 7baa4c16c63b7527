"""The wheel and the sdist: built, looked into, installed into an empty environment and used there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import loopq
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select

ROOT = Path(__file__).parents[2]


def run(*args, **kwargs):
    """Run a command; on failure show what it said."""
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, f"{args}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def clean_environment():
    """The environment without what would let the checkout be found."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def maturin(command, out, *options):
    """Run maturin in the root of the repository; what it makes goes to `out`."""
    if shutil.which("cargo") is None:
        pytest.skip("no Rust toolchain: the wheel cannot be built")
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run(sys.executable, "-m", "maturin", command, *options, "--out", out, cwd=ROOT, env=tools)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """For this system and interpreter, so that what `make build` compiled is reused."""
    out = tmp_path_factory.mktemp("wheel")
    maturin("build", out, "--release", "--compatibility", "linux", "--interpreter", sys.executable)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution, made without compiling."""
    out = tmp_path_factory.mktemp("sdist")
    maturin("sdist", out)
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.mark.slow
def test_wheel_for_old_systems(tmp_path):
    """As `make wheels` builds it, with zig as linker: compiles everything again."""
    maturin("build", tmp_path, "--release", "--zig", "--compatibility", "manylinux_2_28")
    (wheel,) = tmp_path.glob("*.whl")
    assert "-cp311-abi3-manylinux_2_28_" in wheel.name or "-cp311-abi3-manylinux_2_17_" in wheel.name


@pytest.mark.slow
def test_wheel_holds_what_it_must(wheel):
    assert "-cp311-abi3-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "loopq/_native.abi3.so",
        "loopq/_native.pyi",
        "loopq/py.typed",
        "loopq/zoo/weights/huginn_small/model.safetensors",
        "loopq/zoo/data/calibration.txt",
        "loopq/zoo/data/calibration.jsonl.xz",
        "loopq/zoo/data/evaluation.jsonl.xz",
        "loopq/zoo/data/README.md",
    ):
        assert wanted in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert any(n.endswith("licenses/NOTICE") for n in names)
    assert {n.split("/")[0] for n in names} == {
        "loopq",
        next(n.split("/")[0] for n in names if "dist-info" in n),
    }
    assert wheel.stat().st_size < 12e6


@pytest.mark.slow
def test_archives_have_the_version_of_the_sources(wheel, sdist):
    assert wheel.name.startswith(f"loopq-{loopq.__version__}-")
    assert sdist.name == f"loopq-{loopq.__version__}.tar.gz"
    metadata = zipfile.ZipFile(wheel).read(f"loopq-{loopq.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {loopq.__version__}\n" in metadata


def test_sdist_holds_what_building_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
    for wanted in (
        "pyproject.toml",
        "Cargo.lock",
        "rust/loopq-core/src/lib.rs",
        "rust/loopq-cpu/src/lib.rs",
        "rust/loopq-py/src/lib.rs",
        "LICENSE",
    ):
        assert wanted in names
    assert any(n.startswith("kernels/") and n.endswith(".cu") for n in names)


@pytest.mark.slow
def test_sdist_builds(sdist, tmp_path):
    target = {**clean_environment(), "CARGO_TARGET_DIR": str(ROOT / "target")}
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, sdist, env=target)
    assert list(tmp_path.glob("loopq-*.whl"))


@pytest.mark.slow
def test_wheel_solves_in_an_empty_environment(wheel, tiny, tokens, tmp_path):
    job = Collection(tiny.system, tokens, select(tiny.system, tokens))
    collect_rows(job, tmp_path / "dump")
    run(sys.executable, "-m", "venv", tmp_path / "venv", env=clean_environment())
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, env=clean_environment())
    installed = run(python, "-m", "pip", "list", "--format=freeze", env=clean_environment())
    names = {line.split("==")[0] for line in installed.splitlines()}
    assert names <= {"loopq", "numpy", "safetensors", "pip", "setuptools"}
    loopq = tmp_path / "venv" / "bin" / "loopq"
    text = run(
        loopq,
        "solve",
        tmp_path / "dump",
        "--out",
        tmp_path / "out",
        "--bits",
        "4",
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert "transformer.adapter.weight" in text
    assert (tmp_path / "out" / "model.safetensors").is_file()
    done = subprocess.run(
        [loopq, "quantize", "huginn_small", "--out", tmp_path / "q"],
        capture_output=True, text=True, check=False, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install 'loopq[torch]'" in done.stderr
