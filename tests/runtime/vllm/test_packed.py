"""vLLM's own Dory for packed integers: tensors whose rows count something else are not compared."""

from __future__ import annotations

import sys
import types

import pytest


def test_tensors_without_rows_are_not_compared(parts, monkeypatch):
    compared = []

    class DoryForCausalLM:
        @staticmethod
        def _check_weight_shape(name, weight, expected):
            compared.append((name, weight, expected))

    module = types.ModuleType("dory")
    module.DoryForCausalLM = DoryForCausalLM
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.dory", module)
    check = parts("packed").PackedDory._check_weight_shape
    for kind in ("weight_shape", "weight_zero_point", "qweight", "qzeros", "scales", "g_idx"):
        check(f"layers.0.q_proj.{kind}", None, (1,))
    assert compared == []
    for kind in ("weight", "weight_scale", "weight_packed"):
        check(f"layers.0.q_proj.{kind}", 3, (1,))
    assert compared == [
        (f"layers.0.q_proj.{k}", 3, (1,)) for k in ("weight", "weight_scale", "weight_packed")
    ]


def test_a_vllm_without_dory_is_told(parts):
    with pytest.raises(ModuleNotFoundError, match="dory"):
        parts("packed")
