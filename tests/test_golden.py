"""Refactoring changes no code and no scale: every method and calibration mode against recorded checksums."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.golden import files, quantized

RECORD = json.loads((quantized.HERE / "quantized.json").read_text())
ROUNDED = quantized.ROUNDED | quantized.beyond()


def test_the_record_has_every_case():
    assert set(RECORD["exact"]) == set(quantized.EXACT)
    assert set(RECORD["rounded"]) == set(ROUNDED)
    assert len(set(RECORD["exact"].values())) >= len(RECORD["exact"]) - 5  # the cases are different ones


@pytest.mark.parametrize("name", quantized.EXACT)
def test_same_codes_on_every_machine(name):
    assert quantized.digest(quantized.solved(quantized.EXACT[name])) == RECORD["exact"][name]


@pytest.mark.parametrize("name", ROUNDED)
def test_same_codes_on_the_machine_of_the_record(name):
    layers = quantized.solved(ROUNDED[name])
    if quantized.machine() == RECORD["machine"]:
        assert quantized.digest(layers) == RECORD["rounded"][name]
        return
    # Another processor or library rounds last bits of products otherwise, which turns few codes.
    stored = np.load(quantized.HERE / "quantized.npz")
    for layer in layers.values():
        codes = stored[f"{name}|{layer.name}|codes"]
        assert (codes == layer.codes).mean() > 0.9


FILES = json.loads(files.RECORD.read_text())


@pytest.mark.parametrize("name", files.CASES)
def test_same_bytes_of_every_file(name, tmp_path):
    digests, wanted = files.CASES[name](tmp_path), FILES[name]
    assert set(digests) == set(wanted)
    # Losses in the reports of a solve are sums of floats; their last bits depend on the processor.
    compared = {n for n in wanted if not name.startswith("dump-") or n.endswith(".safetensors")}
    assert {n: digests[n] for n in compared} == {n: wanted[n] for n in compared}
