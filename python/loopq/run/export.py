"""Write a checkpoint for other tools and check what is on the disk: the numbers, and the model behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.select import treat
from loopq.errors import CheckpointError, ConfigError, MissingExtraError, SystemContractError
from loopq.formats import FORMATS
from loopq.formats.base import Format, Planned, Written, WrittenFile
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import read_any, read_model
from loopq.inference.restore import load_checkpoint
from loopq.layers.layer import QuantizedLayer
from loopq.lazy import require
from loopq.models.load import LoadedModel
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig, refuse_outside
from loopq.run.imatrix import ObservedDump
from loopq.run.plan import Plan
from loopq.storage.files import DTYPE_NAMES
from loopq.storage.lock import new_or_same
from loopq.storage.model_files import stored_state
from loopq.systems.base import Batch

if TYPE_CHECKING:
    from torch import nn

#: How a path is opened, by what a format is written from.
_OPEN: Mapping[str, Callable[[str | Path], Any]] = {
    "checkpoint": read_any,
    "model": read_model,
    "dump": ObservedDump,
}


@dataclass(frozen=True)
class Exported:
    """What an export wrote, and how the model behind it compares.

    Parameters
    ----------
    written : Written
        Place, bytes, what had to be changed for the format, layers compared.
    n_prompts : int
        Prompts whose logits were compared; 0 where no model could be built.
    difference : float or None
        Largest difference between the logits of the model before the export and after it.
    reason : str
        Why logits were not compared; empty where loopq cannot read the format back.
    """

    written: Written
    n_prompts: int
    difference: float | None
    reason: str

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        if self.difference is None:
            why = [f"logits not compared: {self.reason}"] if self.reason else []
            return [*self.written.lines(), *why]
        text = f"logits of {self.n_prompts} prompts: largest difference {self.difference:g}"
        return [*self.written.lines(), text]


def export(
    source: str | Path | Checkpoint,
    out: str | Path,
    format_name: str,
    *,
    n_prompts: int = 2,
    seq_len: int = 16,
    trust_remote_code: bool = False,
    **options: Any,
) -> Exported:
    """Write a checkpoint in a format that other tools load, and check what is on the disk.

    Parameters
    ----------
    source : path or Checkpoint
        Checkpoint, in memory or in a folder of any format that loopq reads. For "gguf" also a model that is not
        quantized: a folder, or ``looped:FOLDER[FIRST:LAST]xTIMES``. For "imatrix" a calibration dump.
    out : path
        New folder; for "gguf" and "imatrix" a new file.
    format_name : str
        A name in `loopq.formats.FORMATS`.
    n_prompts, seq_len : int
        Prompts of random tokens, and their length, for the comparison of logits.
    trust_remote_code : bool
        Allow code that came with the model to run, so that logits can be compared.
    **options
        Options of the format: "ragged" ("keep", "split" or "pad": what to do with a last group that is shorter than
        the others) of compressed-tensors, gptq, gptq_v2 and marlin; "vocabulary" (a GGUF file whose tokenizer is
        copied) of gguf; "steps" (those that count) of imatrix.

    Returns
    -------
    Exported
        What was written and what was compared.

    Raises
    ------
    CheckpointError
        The format cannot hold the checkpoint, or what was read back differs from what was solved.
    ConfigError
        No such format, or an option that the format does not read.
    """
    out = Path(out)
    with new_or_same(out) as place:
        done = exported(source, place, format_name, n_prompts, seq_len, trust_remote_code, **options)
    if place != out:
        said = (f"{out} was written before the interruption; compared, byte for byte",)
        return dataclasses.replace(done, written=WrittenFile(out, format_name, said))
    return done


def exported(
    source: str | Path | Checkpoint,
    out: Path,
    format_name: str,
    n_prompts: int = 2,
    seq_len: int = 16,
    trust_remote_code: bool = False,
    **options: Any,
) -> Exported:
    """As `export`, of a caller that holds the output (`loopq.storage.lock`)."""
    target = FORMATS.get(format_name)
    given = target.taken(options)
    if isinstance(source, Checkpoint):
        target.refuse_checkpoint()
    opened = source if isinstance(source, Checkpoint) else _OPEN[target.takes](source)
    difference, reason = 0.0, ""

    def compare_logits(again: Checkpoint) -> None:
        nonlocal difference, reason
        try:
            before = _logits(opened, n_prompts, seq_len, trust_remote_code)
        except (ConfigError, MissingExtraError, SystemContractError, CheckpointError, ValueError) as error:
            # What the checkpoint was before says nothing against the export: its numbers were compared.
            reason = str(error).splitlines()[0]
            return
        difference = float(np.abs(before - _logits(again, n_prompts, seq_len, trust_remote_code)).max())
        if difference != 0.0:
            raise CheckpointError(f"{out}: logits differ by {difference:g} from those before")

    written = target.write(out, opened, also=compare_logits, **given)
    if reason or not target.reads:
        return Exported(written, 0, None, reason)
    return Exported(written, n_prompts, difference, "")


def quantized_format(format_name: str) -> Format:
    """Return a format that a quantized model can be written in.

    Raises
    ------
    ConfigError
        No such format, or one that is not written from a checkpoint; the message says from what.
    """
    target = FORMATS.get(format_name)
    target.refuse_checkpoint()
    return target


def refuse_early(
    loaded: LoadedModel, config: QuantConfig, format_name: str, n_steps: int | None = None, **options: Any
) -> None:
    """Refuse before a run what an export after it would refuse: a grid, groups or a model that has no place there.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    config : QuantConfig
        Settings of the run.
    format_name : str
        As in `export`.
    n_steps : int, optional
        Depth; the model's own when absent.
    **options
        As in `export`.

    Raises
    ------
    CheckpointError
        The format cannot hold a layer; the message says which and what can be done.

    Notes
    -----
    A layer of one row stands for each one. Whether a format's scale type holds the scales depends on their values
    (GPTQ and Marlin, and bfloat16 in GGUF), and is seen after the run alone.
    """
    target = quantized_format(format_name)
    given = target.taken(options)
    if target.own:
        return
    if not target.holds_tables:
        refuse_outside(config, f"{format_name} cannot hold", "leave it away, or keep loopq's own format")
    system = loaded.system
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    parameters = treat(system.shared_parameters(depth), config.include, config.exclude)
    tasks = Plan.of(parameters, {}, config).tasks
    dense, ties = _other_tensors(system.model, {t.name for t in tasks})
    planned = Planned(
        tuple(map(_stand_in, tasks)),
        tuple(t.name for t in tasks if t.config.rotation.kind != "none" or t.config.method.name == "awq"),
        tuple(t.name for t in tasks if t.config.method.name == "trellis"),
        tuple(t.name for t in tasks if not t.parameter.owners),
        dense,
        ties,
        loaded.side_files,
    )
    target.refuse(planned, **given)


def _other_tensors(model: nn.Module, layers: set[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Types of the tensors that stay as they are, by the first name, and the further names of those that are tied."""
    dense: dict[str, str] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in stored_state(model).items():
        source = first.setdefault(id(tensor), name)
        if source != name:
            ties[name] = source
        elif name not in layers:
            kind = str(tensor.dtype).removeprefix("torch.")
            dense[name] = DTYPE_NAMES.get(kind, kind)
    return dense, ties


def _stand_in(task: Task) -> QuantizedLayer:
    """One row of the layer that a task will give: zero codes, scales of 1."""
    p, grid = task.parameter, task.config.grid.grid()
    groups = grid.n_groups(p.in_features)
    codes = np.zeros((1, p.in_features), grid.dtype)
    zeros = None if grid.symmetric else np.zeros((1, groups), grid.zeros_dtype)
    scales = np.ones((1, groups), np.float32)
    return QuantizedLayer(task.name, grid, codes, scales, zeros, p.orientation)


def _logits(checkpoint: Checkpoint, n_prompts: int, seq_len: int, trust_remote_code: bool) -> NDArray[Any]:
    torch = require("torch")
    loaded = load_checkpoint(checkpoint, trust_remote_code=trust_remote_code)
    vocabulary = int(loaded.config.get("vocab_size", 256))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(vocabulary, 4), vocabulary, (n_prompts, seq_len), generator=generator)
    n_steps = checkpoint.settings.get("n_steps") or loaded.system.n_steps
    with torch.no_grad():
        logits = loaded.system.rollout(Batch(ids, tuple(range(n_prompts))), int(n_steps))
    found: NDArray[Any] = logits.float().cpu().numpy()
    return found
