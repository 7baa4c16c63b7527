"""Ranks that meet, and ranks that are late or have other work."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from loopq.calibrate.hessian_dump import HessianDump
from loopq.calibrate.hessian_set import HessianSet
from loopq.errors import CalibrationError, ConfigError, LoopqError
from loopq.run.ranks import Ranks, collect_hessians
from tests.support.runs import job_of


@pytest.fixture
def meeting(monkeypatch):
    """Where processes meet: a port that is free."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def met(world, work):
    """The error that each of several processes gets when they share work; None where all is well."""

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
    texts = met(4, {0: "a", 2: "a"})
    assert all(
        text.startswith("rank 1, 3 of 4 did not come within 2 s; what is saved stays") for text in texts
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


def test_a_rank_that_fails_is_named(loaded, tokens, tmp_path, monkeypatch):
    def share_pass(*_):
        raise CalibrationError("no rows")

    monkeypatch.setattr(HessianSet, "share_pass", share_pass)
    ranks = SimpleNamespace(rank=0, world=2, meet=lambda key: None)
    with pytest.raises(CalibrationError, match="rank 0 of 2: no rows"):
        collect_hessians(ranks, HessianDump.of(job_of(loaded, tokens), tmp_path / "d"))
