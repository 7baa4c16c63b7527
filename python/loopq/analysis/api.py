"""The public function of the analysis: diagnose a loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.survey import diagnose as survey
from loopq.annotations import listed
from loopq.calibrate.prompts import Prompts, Take, calibration_tokens
from loopq.models.from_python import Opening, open_model
from loopq.models.plain import plain_modes
from loopq.run.config import divided
from loopq.settings.execution import Execution

if TYPE_CHECKING:
    from loopq.api import Model
    from loopq.run.keywords import MeasureKeywords


def diagnose(
    model: Model,
    calibration: Prompts = None,
    config: DiagnoseConfig | None = None,
    *,
    n_steps: int | None = None,
    only: Sequence[str] | None = None,
    name: str = "",
    **options: Unpack[MeasureKeywords],
) -> dict[str, Any]:
    """Measure the effect of the loop on its own error: ranks by step, exposure, ablation, spectral radius.

    Parameters
    ----------
    model : str, Path, LoadedModel, LoopedSystem or torch module
        Full-precision model. The same kinds as in `quantize` are accepted.
    calibration : TokenSet, token ids, path, or None
        Prompts, as in `quantize`.
    config : DiagnoseConfig, optional
        Settings of the diagnosis.
    n_steps : int, optional
        Depth. The model's own depth is the default.
    only : str or sequence of str, optional
        Sections to run (`loopq.analysis.diagnosis.sections.SECTIONS`). By default all that the system supports.
    name : str
        Name of the model in the result.
    **options
        "n_prompts" and "seq_len" of the prompts, "tokenizer" and "trust_remote_code" as in `quantize`, and settings of
        `Execution`.

    Returns
    -------
    dict
        Data of `loopq.analysis.report.page.write_page`. Its schema is in `loopq.analysis.report`.
    """
    execution, take, opening = divided(options, Execution(), Take(), Opening())
    only = listed(only, tuple[str, ...])
    with plain_modes():
        loaded = open_model(model, opening)
        tokens = calibration_tokens(loaded, calibration, take)
        depth = loaded.system.n_steps if n_steps is None else n_steps
        context = Context(loaded.system, tokens, depth, config or DiagnoseConfig(), execution=execution)
        return survey(context, only=only, name=name or (str(model) if isinstance(model, str | Path) else ""))
