"""A model with its own weights and with others."""

from __future__ import annotations

import numpy as np

from loopq.evaluate.compare import compare


def test_comparison_of_a_model_with_itself(loaded, tokens):
    own = {p.name: loaded.system.parameter(p).detach().numpy() for p in loaded.system.shared_parameters(3)}
    reference, same = compare(loaded.system, {"same": own}, tokens, seeds=(0, 1), batch_size=4)
    assert np.array_equal(same.kl, np.zeros((2, 10)))
    assert np.array_equal(same.agreement, np.ones((2, 10)))
    assert np.array_equal(same.nll, reference.nll)
    assert not np.array_equal(reference.nll[0], reference.nll[1])
    other = {n: w + 0.05 * np.sign(w) for n, w in own.items()}
    worse = compare(loaded.system, {"other": other}, tokens)[1]
    assert (worse.kl > 0).all()
