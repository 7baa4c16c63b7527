"""The section `jacobian` of a diagnosis."""

from __future__ import annotations

import dataclasses

from loopq.analysis.diagnosis.sections import SECTIONS


def test_its_data_has_what_the_page_reads(diagnosis):
    assert set(diagnosis["sections"]["jacobian"]) == {"acceptance", "prompts", "settings", "states"}


def test_the_spectral_radius_is_printed_with_its_acceptance(saved_model, command, monkeypatch):
    """The numbers themselves are those of `test_spectral`; here they are made up."""
    maps = {name: {"radius": {"estimate": value}} for name, value in (("reference", 0.9), ("changed", 0.8))}
    result = {
        "acceptance": {"n_accepted": 5, "n_maps": 6, "largest_residual": 2e-5, "largest_disagreement": 3e-4},
        "states": {"plain": {"maps": maps, "n_accepted": 1, "n_prompts": 2}},
    }
    section = dataclasses.replace(SECTIONS.get("jacobian"), run=lambda context: result)
    monkeypatch.setitem(SECTIONS._entries, "jacobian", section)
    code, text, err = command(
        "diagnose", saved_model, "--only", "jacobian", "--n-prompts", 2, "--seq-len", 24
    )
    assert code == 0, err
    assert (
        "spectral radius of a step: 5 of 6 maps meet the acceptance rules; mean 0.900, rounded 0.800 on 1 of 2 "
        "prompts; largest relative residual 2.0e-05, largest disagreement of two starts 3.0e-04"
    ) in text.splitlines()
