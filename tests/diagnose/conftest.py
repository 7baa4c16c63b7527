"""Torch is needed by every diagnosis that runs the model; here it is one thread and deterministic."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

try:
    import torch
except ImportError:
    collect_ignore = [
        "test_exposure.py",
        "test_spectral.py",
        "test_sensitivity.py",
        "test_survey.py",
        "test_zoo.py",
    ]
else:

    @pytest.fixture(autouse=True)
    def one_thread():
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
