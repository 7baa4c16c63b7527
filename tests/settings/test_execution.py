"""How work is carried out."""

from __future__ import annotations

import pytest
import torch

from loopq.calibrate.device import DeviceSums
from loopq.errors import ConfigError
from loopq.settings.execution import Execution, available_bytes, parse_bytes, require_float32


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("512", 512), ("8G", 8 << 30), ("1.5k", 1536), ("2 MiB", 2 << 20), ("3TB", 3 << 40)],
)
def test_bytes_have_units_of_1024(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "8X", "1e9", "9" * 16])
def test_other_texts_are_no_bytes(text):
    with pytest.raises(ValueError, match="give bytes with a unit, as in 8G or 512M"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "bad", [{"seed": -1}, {"batch_size": 0}, {"threads": -1}, {"memory": 0}, {"work": "x"}]
)
def test_refuses(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Execution(**bad)


def test_folders_lie_in_the_work_folder(tmp_path):
    assert Execution().folder("layers") is None
    assert Execution(work=tmp_path).folder("layers") == tmp_path / "layers"


def test_free_memory_is_within_the_limits_of_containers(tmp_path):
    """As in a step of a batch job: its own group has no limit, that of the job has one."""
    assert available_bytes(tmp_path) is None
    proc, job = tmp_path / "proc", tmp_path / "sys/fs/cgroup/job"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    64 kB\n")
    assert available_bytes(tmp_path) == 64 << 10
    (proc / "self/cgroup").write_text("4:memory:/other\n0::/job/step\n")
    (job / "step").mkdir(parents=True)
    (job / "step/memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 64 << 10
    for name, text in {"max": "40960\n", "current": "30720\n", "stat": "anon 10240\nfile 20480\n"}.items():
        (job / f"memory.{name}").write_text(text)
    # The pages of files can be taken.
    assert available_bytes(tmp_path) == 40960 - 30720 + 20480
    (job / "memory.max").write_text("1024\n")
    assert available_bytes(tmp_path) == 0


def test_rounded_products_are_refused_and_the_setting_stays():
    require_float32()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ConfigError, match="set 'highest' before"):
            DeviceSums(2, per_step=False).add(0, torch.ones(3, 2))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
