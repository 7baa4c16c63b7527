"""Fixtures shared by all tests: a tiny looped model, the path of the data folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# As the command line does: threads of torch that spin while they wait take a busy machine's cores from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A busy machine is no reason to fail; `--hypothesis-profile=soak` searches much longer.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("loopq", _PATIENT)
settings.register_profile("soak", _PATIENT, max_examples=20_000)
settings.load_profile("loopq")


@pytest.fixture
def data_folder() -> Path:
    """Folder of data sets; tests that need it are skipped where it is not there."""
    folder = Path(os.environ.get("LOOPQ_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set LOOPQ_DATA")
    return folder


def tiny_model():
    """A Huginn-like model of width 32 with random weights, depth 3."""
    import torch

    from loopq.zoo.huginn import HuginnConfig, SmallHuginn

    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = HuginnConfig(n_embd=32, n_heads=2, intermediate_size=48, mean_recurrence=3)
        return SmallHuginn(config).eval()


@pytest.fixture
def tiny():
    """The tiny model as loaded by loopq."""
    from loopq.models.load import LoadedModel, describe, encode_bytes
    from loopq.systems.huginn import Huginn

    model = tiny_model()
    return LoadedModel(
        model=model,
        system=Huginn(model),
        encode=encode_bytes,
        tokenizer=None,
        config=model.config.to_dict(),
        folder=None,
        side_files={},
        report=describe(model, "tiny", "registered"),
    )


@pytest.fixture
def tiny_folder(tiny, tmp_path: Path) -> Path:
    """The tiny model as a folder."""
    from benches.zoo.store import save_model

    folder = tmp_path / "tiny-model"
    save_model(tiny.model, folder)
    return folder


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory) -> Path:
    """A folder with the tiny model, for tests that only read it."""
    from benches.zoo.store import save_model

    folder = tmp_path_factory.mktemp("models") / "tiny-model"
    save_model(tiny_model(), folder)
    return folder


@pytest.fixture
def command(capsys, monkeypatch):
    """Run a command of the command line in this process; gives its exit code, output and errors."""
    from loopq.cli import main
    from loopq.storage import journal

    # Files of `--register` that other tests ran belong to each key of this process, and to none of a new one.
    monkeypatch.setattr(journal, "_RAN", [])

    def run(*args: object) -> tuple[int, str, str]:
        try:
            code = main([str(a) for a in args])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def loaded(tiny_folder: Path):
    """The tiny model as loaded from its folder."""
    from loopq.models.load import load_model

    return load_model(tiny_folder)


@pytest.fixture
def checkpoint_folder(loaded, tokens, tmp_path: Path) -> Path:
    """Checkpoint of the tiny model as `tests.support.runs.SETTINGS` say."""
    import loopq
    from tests.support.runs import SETTINGS

    out = tmp_path / "plain"
    loopq.quantize(loaded, tokens, out=out, batch_size=3, **SETTINGS)
    return out


@pytest.fixture
def tokens():
    """Ten prompts of 24 bytes."""
    from loopq.calibrate.data import windows
    from loopq.models.load import encode_bytes

    text = "".join(chr(97 + (i * i + 3 * i) % 26) + (" " if i % 5 == 0 else "") for i in range(400))
    return windows(text, encode_bytes, 24, 10, "made text")


@pytest.fixture
def solved(tiny_folder, tokens, tmp_path):
    """Checkpoint of the tiny model, rounded to four bits."""
    import loopq

    out = tmp_path / "q"
    loopq.quantize(tiny_folder, tokens, out=out, method="rtn", bits=4, group_size=16)
    return out


@pytest.fixture(scope="session")
def small_demo():
    """The demo on one grid and two prompts, for what is shown of it."""
    from loopq.commands import variants
    from tests.support.demos import FEWEST

    return variants.run(best=True, **FEWEST)


@pytest.fixture(scope="session")
def quantized(saved_model, tmp_path_factory) -> Path:
    """A native checkpoint of the tiny model, GPTQ, INT4 g16, for tests that only read it."""
    import benches.zoo.chains  # noqa: F401  registers the letter task
    from loopq.cli import main
    from tests.support.runs import TINY

    out = tmp_path_factory.mktemp("quantized") / "q"
    settings = ["--preset", "paper", "--group-size", "16", *TINY]
    assert main(["quantize", str(saved_model), "--out", str(out), *settings]) == 0
    return out


@pytest.fixture
def data(tmp_path):
    """A handful of items of three tasks."""
    items = {
        "lambada/lambada_test.jsonl": [
            {"text": f"He said that the {w}"} for w in ("sea", "sun", "day", "end")
        ],
        "arc/arc_easy_test.jsonl": [
            {"query": f"Question: {q}?", "choices": ["one", "two", "it is none of them"], "gold": g}
            for q, g in (("How many", 0), ("Which", 1), ("What", 2))
        ],
    }
    for name, records in items.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "data" / "wikitext2").mkdir()
    (tmp_path / "data" / "wikitext2" / "wiki.test.raw").write_text(
        " = A = \n It was . \n = B = \n So be it . \n"
    )
    return tmp_path / "data"
