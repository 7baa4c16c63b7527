"""The page of PL-BERT in `loopq demo --html`."""

from __future__ import annotations

from pathlib import Path

from loopq.analysis.commands.demo import PAGES, DemoPage
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.calibrate.data import TokenSet
from loopq.models.load import LoadedModel
from loopq.paper.plbert import PLBERT, data_folder, load_plbert, phonemes, plbert_folder


def opened(data: Path | None) -> tuple[LoadedModel, TokenSet, TokenSet]:
    """Return PL-BERT, its training prompts and its diagnosed prompts."""
    folder = data_folder(data)
    train, held_out = phonemes(folder, "calibration", 128, 4), phonemes(folder, "evaluation", 128, 16)
    return load_plbert(folder), train, held_out


def absent(data: Path | None) -> str:
    """Return why PL-BERT is not there. The text is empty if it is.

    Raises
    ------
    ConfigError
        The data folder does not exist.
    """
    folder = data_folder(data)
    if folder is not None and plbert_folder(folder).is_dir():
        return ""
    return f"its weights are not in {folder or 'a data folder'}; give --data DIR or set LOOPQ_DATA"


PAGES.register(PLBERT)(
    DemoPage(
        DiagnoseConfig(n_prompts=2, n_ablation_prompts=2, n_jacobian_prompts=1, seeds=(0,)),
        opened,
        absent,
        batch_size=2,
    )
)
