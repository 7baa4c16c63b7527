"""How work is carried out."""

from __future__ import annotations

import argparse
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from loopq.errors import ConfigError, LoopqError
from loopq.settings.execution import Execution, Ranks, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("512", 512), ("8G", 8 << 30), ("1.5k", 1536), ("2 MiB", 2 << 20), ("3TB", 3 << 40)],
)
def test_bytes_have_units_of_1024(text, n_bytes):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "8X", "1e9", "9" * 16])
def test_other_texts_are_no_bytes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give bytes with a unit, as in 8G or 512M"):
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


@pytest.fixture
def meeting(monkeypatch):
    """Where processes meet: a port that is free."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def met(world, work):
    """What each of some processes is told that meet with some work; None where all is well."""

    def meet(rank):
        try:
            Ranks(rank, world, timeout=2).meet(work[rank])
        except LoopqError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(meet, work))


def test_processes_meet_and_agree(meeting):
    assert met(3, {0: "a", 1: "a", 2: "a"}) == [None] * 3


def test_a_rank_that_does_not_come_is_named_to_all(meeting):
    found = met(4, {0: "a", 2: "a"})
    assert all(
        text.startswith("rank 1, 3 of 4 did not come within 2 s; what is saved stays") for text in found
    )


def test_where_rank_0_does_not_come_there_is_nobody_to_ask(meeting):
    (text,) = met(2, {1: "a"})
    assert text.startswith("rank 1 of 2: rank 0 at localhost:")
    assert "did not come within 2 s" in text


def test_a_rank_with_other_work_is_named(meeting):
    assert met(3, {0: "a", 1: "a", 2: "b"})[0].startswith("rank 2 of 3 has other work than rank 0: the model")


def test_one_process_has_no_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.of_environment() is None
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    assert Ranks.of_environment() == Ranks(2, 3)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="start the processes with torchrun"):
        Ranks.of_environment()
