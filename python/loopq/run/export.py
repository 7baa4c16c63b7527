"""Write a checkpoint for other tools and check what is on the disk: the numbers, and the model behind them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.select import treat
from loopq.errors import CheckpointError, ConfigError, MissingExtraError, SystemContractError
from loopq.formats import FORMATS
from loopq.formats.base import Ragged
from loopq.formats.convert import NATIVE, Written, read_any, refuse_own, write_as
from loopq.formats.native import Checkpoint
from loopq.inference.restore import load_checkpoint
from loopq.layers.layer import QuantizedLayer
from loopq.lazy import require
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig, refuse_outside
from loopq.run.plan import Plan
from loopq.storage.files import check_new
from loopq.systems.base import Batch, LoopedSystem


@dataclass(frozen=True)
class Exported:
    """What an export wrote, and how the model behind it compares.

    Parameters
    ----------
    written : Written
        Folder, bytes, what had to be changed for the format, layers compared.
    n_prompts : int
        Prompts whose logits were compared; 0 where no model could be built.
    difference : float or None
        Largest difference between the logits of the model before the export and after it.
    reason : str
        Why logits were not compared.
    """

    written: Written
    n_prompts: int
    difference: float | None
    reason: str

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        if self.difference is None:
            return [*self.written.lines(), f"logits not compared: {self.reason}"]
        text = f"logits of {self.n_prompts} prompts: largest difference {self.difference:g}"
        return [*self.written.lines(), text]


def export(
    source: str | Path | Checkpoint,
    out: str | Path,
    format_name: str,
    *,
    ragged: Ragged | None = None,
    n_prompts: int = 2,
    seq_len: int = 16,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a checkpoint in a format that other tools load, and check what is on the disk.

    Parameters
    ----------
    source : path or Checkpoint
        Checkpoint, in a folder of any format that loopq reads.
    out : path
        New folder.
    format_name : str
        "native" or a name in `loopq.formats.FORMATS`.
    ragged : {"keep", "split", "pad"}, optional
        What to do with a last group that is shorter than the others.
    n_prompts, seq_len : int
        Prompts of random tokens, and their length, for the comparison of logits.
    trust_remote_code : bool
        Allow code that came with the model to run, so that logits can be compared.

    Returns
    -------
    Exported
        What was written and what was compared.

    Raises
    ------
    CheckpointError
        The format cannot hold the checkpoint, or what was read back differs from what was solved.
    """
    check_new(Path(out))
    checkpoint = source if isinstance(source, Checkpoint) else read_any(source)
    difference, reason = 0.0, ""

    def compare_logits(again: Checkpoint) -> None:
        nonlocal difference, reason
        try:
            before = _logits(checkpoint, n_prompts, seq_len, trust_remote_code)
        except (ConfigError, MissingExtraError, SystemContractError, CheckpointError, ValueError) as error:
            # What the checkpoint was before says nothing against the export: its numbers were compared.
            reason = str(error).splitlines()[0]
            return
        difference = float(np.abs(before - _logits(again, n_prompts, seq_len, trust_remote_code)).max())
        if difference != 0.0:
            raise CheckpointError(f"{out}: logits differ by {difference:g} from those before")

    written = write_as(out, checkpoint, format_name, ragged=ragged, also=compare_logits)
    return Exported(written, 0, None, reason) if reason else Exported(written, n_prompts, difference, "")


def refuse_early(
    system: LoopedSystem,
    config: QuantConfig,
    format_name: str,
    ragged: Ragged | None,
    n_steps: int | None = None,
) -> None:
    """Refuse before a run what an export after it would refuse: a grid or groups that the format cannot hold.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    config : QuantConfig
        Settings of the run.
    format_name, ragged
        As in `export`.
    n_steps : int, optional
        Depth; the model's own when absent.

    Raises
    ------
    CheckpointError
        The format cannot hold a layer; the message says which and what can be done.

    Notes
    -----
    A layer of one row stands for each one. What depends on the values of scales (float16 for GPTQ and Marlin) is
    seen after the run alone.
    """
    if format_name == NATIVE:
        return
    refuse_outside(config, f"{format_name} cannot hold", "leave it away, or keep loopq's own format")
    target = FORMATS.get(format_name)
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    parameters = treat(system.shared_parameters(depth), config.include, config.exclude)
    tasks = Plan.of(parameters, {}, config).tasks
    turned = [t.name for t in tasks if t.config.rotation.kind != "none" or t.config.method.name == "awq"]
    refuse_own(turned, [t.name for t in tasks if t.config.method.name == "trellis"], target)
    for task in tasks:
        target.prepare(_stand_in(task), ragged)


def _stand_in(task: Task) -> QuantizedLayer:
    """One row of the layer that a task will give: zero codes, scales of 1."""
    p, grid = task.parameter, task.config.grid
    groups = grid.n_groups(p.in_features)
    codes = np.zeros((1, p.in_features), np.int8 if grid.symmetric else np.uint8)
    zeros = None if grid.symmetric else np.zeros((1, groups), np.uint8)
    scales = np.ones((1, groups), np.float32)
    return QuantizedLayer(
        task.name,
        grid.bits,
        grid.group_size,
        grid.symmetric,
        codes,
        scales,
        zeros,
        grid.scale_dtype,
        p.orientation,
    )


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
