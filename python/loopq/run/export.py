"""Write a checkpoint for other tools and check the result on disk: its numbers, and its model's logits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq._native import __version__
from loopq.calibrate.select import treat
from loopq.errors import CheckpointError, ConfigError, MissingExtraError, SystemContractError, require
from loopq.formats import FORMATS
from loopq.formats.base import Format, FormatOptions, Planned, Written
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.hf_folder import CONFIG
from loopq.formats.record import config_of
from loopq.layers.layer import QuantizedLayer
from loopq.layers.loop_spec import LOOP, with_loop
from loopq.layers.transforms import ChannelScale
from loopq.models.load import LoadedModel
from loopq.models.restore import load_checkpoint
from loopq.quantizers.folding import FOLDINGS, Folds
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig, refuse_outside
from loopq.run.gate import LOOPQ, Asked, Expectation, Gate, Proof, audience
from loopq.run.plan import Plan
from loopq.storage.files import DTYPE_NAMES
from loopq.storage.model_files import beside, stored_state
from loopq.systems.base import Batch
from loopq.systems.capabilities import FixedLength

if TYPE_CHECKING:
    from torch import Tensor, nn


#: Type of the transforms that a layer before may take.
_SCALE = "channel_scale"
#: Errors of a checkpoint whose model cannot be built or run here.
_NO_LOGITS = (ConfigError, MissingExtraError, SystemContractError, CheckpointError, ValueError)


@dataclass(frozen=True)
class Exported:
    """Result of an export, and its comparison with the model before.

    Parameters
    ----------
    written : Written
        Place, bytes, changes made for the format, and compared layers.
    n_prompts : int
        Prompts with compared logits. It is 0 if no model could be built.
    difference : float or None
        Largest difference between the logits of the model before and after the export.
    reason : str
        Reason for missing logits. It is empty if loopq cannot read the format back.
    read_by : tuple of str
        Lines about the engines that read the file. The last one says for whom it is, and how it is loaded.
    """

    written: Written
    n_prompts: int
    difference: float | None
    reason: str
    read_by: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        said = [f"logits not compared: {self.reason}"] if self.reason else []
        if self.difference is not None:
            said = [f"logits of {self.n_prompts} prompts: largest difference {self.difference:g}"]
        return [*self.written.lines(), *said, *self.read_by]


def exported(
    source: Any,
    out: Path,
    format_name: str,
    gate: Gate | None = None,
    proof: Proof | None = None,
    options: FormatOptions | None = None,
) -> Exported:
    """Export as `loopq.export` does, from what it opened, for a caller that holds the output (`loopq.storage.lock`)."""
    gate, proof = gate or Gate(), proof or Proof()
    target = FORMATS.get(format_name)
    options = options or target.values()
    if not isinstance(source, Checkpoint):
        written = target.write(out, source, options)
        return Exported(
            written, 0, None, "", (f"for llama.cpp: llama-quantize --imatrix {out} MODEL OUT TYPE",)
        )
    target.refuse_checkpoint()
    engines, forced = gate.of(format_name, source, options)
    # The code of a loop is loopq's own.
    trust = proof.trust_remote_code or options.remote_code
    asked = Asked(format_name, engines, trust) if gate.verify and engines and not target.own else None
    comparison = LogitsCheck(source, proof, asks=asked is not None)
    options = dataclasses.replace(options, typed=True, forced=forced)
    written = target.write(out, source, options, also=lambda again: comparison.after(again, out))
    lines: tuple[str, ...] = (f"forced: {forced}",) if forced else ()
    if not (engines or forced or target.own):
        lines = (f"loopq {__version__} read it: no other engine has the class",)
    difference, reason = comparison.difference, comparison.reason
    if asked is not None and not reason:
        lines += asked.lines(out, source, comparison.expectation, force=gate.force)
    lines += (audience(format_name, engines, source, options, out),)
    return Exported(written, proof.n_prompts * (difference is not None), difference, reason, lines)


class LogitsCheck:
    """A model's logits before an export, and after it.

    Parameters
    ----------
    source : Checkpoint
        What is exported.
    proof : Proof
        The prompts.
    asks : bool
        Whether engines are asked about the file: the model before says what they must give.

    Attributes
    ----------
    difference : float or None
        Largest difference of what was read back. None if nothing was compared.
    reason : str
        Why there are no logits before. Empty if there are, or nothing asked for them.
    """

    def __init__(self, source: Checkpoint, proof: Proof, *, asks: bool) -> None:
        self._source, self._proof, self._asks = source, proof, asks
        self._before: NDArray[Any] | None = None
        self._expected: Expectation | None = None
        self.difference: float | None = None
        self.reason = ""

    def before(self) -> NDArray[Any] | None:
        """Return the logits of the source; None, with `reason`, if its model cannot be built or run here."""
        if self._before is None and not self.reason:
            try:
                loaded, batch, self._before = _run(self._source, self._proof)
                if self._asks and (expected := expected_of(loaded, batch.input_ids)) is not None:
                    # The last use of the model.
                    self._expected = dataclasses.replace(expected, slack=round_weights(loaded, expected))
            except _NO_LOGITS as error:
                self._before, self.reason = None, str(error).splitlines()[0]
        return self._before

    def after(self, again: Checkpoint, out: Path) -> None:
        """Compare a checkpoint that was read back.

        Raises
        ------
        CheckpointError
            It has other logits.
        """
        before = self.before()
        # A problem of the earlier checkpoint does not invalidate the export, because its numbers were compared.
        if before is None:
            return
        self.difference = float(np.abs(before - _run(again, self._proof)[2]).max())
        if self.difference != 0.0:
            raise CheckpointError(f"{out}: logits differ by {self.difference:g} from those before")

    def expectation(self) -> Expectation | str:
        """Return what engines must say of the source, or why it is not known."""
        if self.before() is None:
            return self.reason
        return self._expected or "the model draws its first state, and its system does not tell it"


def folded(
    checkpoint: Checkpoint, loaded: LoadedModel | None = None, *, trust_remote_code: bool = False
) -> Checkpoint:
    """Return a checkpoint whose channel scales are in the layers before. The same object without any scale.

    Raises
    ------
    ConfigError
        No guest brings the folding.
    CheckpointError
        A scale has no place, or does not fold exactly. The message names the layer.
    """
    names = [n for n, layer in checkpoint.layers.items() if isinstance(layer.transform, ChannelScale)]
    if not names:
        return checkpoint
    loaded = loaded or load_checkpoint(checkpoint, trust_remote_code=trust_remote_code)
    folds = _folds(loaded, names, checkpoint.settings.get("n_steps"))
    fold = FOLDINGS.get(_SCALE).fold
    layers, dense = fold(checkpoint.layers, checkpoint.dense, folds, loaded.system.model)
    return dataclasses.replace(checkpoint, layers=layers, dense=dense)


def _folds(loaded: LoadedModel, names: Collection[str], n_steps: int | None) -> Folds:
    """Modules that take the scales of some layers."""
    system = loaded.system
    depth = system.check_depth(n_steps or system.n_steps)
    owners = {p.name: p.owners for p in system.shared_parameters(depth) if p.name in names}
    batch = _random_batch(loaded, 1, system.prompt_length if isinstance(system, FixedLength) else 8)
    return FOLDINGS.get(_SCALE).find(system.model, owners, lambda: system.rollout(batch, depth))


def quantized_format(format_name: str) -> Format:
    """Return a format for quantized models.

    Raises
    ------
    ConfigError
        The format does not exist, or is not written from a checkpoint. The message names its source.
    """
    target = FORMATS.get(format_name)
    target.refuse_checkpoint()
    return target


def refuse_early(
    loaded: LoadedModel,
    config: QuantConfig,
    format_name: str,
    n_steps: int | None = None,
    gate: Gate | None = None,
    options: FormatOptions | None = None,
) -> None:
    """Refuse before a run anything that the export would refuse later: a grid, groups or a model.

    The depth is the model's own by default. `gate` has the engines that the file is for.

    Raises
    ------
    CheckpointError
        The format cannot hold a layer. The message names the layer and a remedy.

    Notes
    -----
    One row represents each layer. In GPTQ and bfloat16 of GGUF the scales' values decide whether their type fits.
    This is known only after the run.
    """
    target, gate = quantized_format(format_name), gate or Gate()
    options = options or target.values()
    if target.own and gate.engine in (None, LOOPQ):
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
        tuple(t.name for t in tasks if t.config.rotates or t.config.method.transforms),
        tuple(t.name for t in tasks if not t.parameter.owners),
        dense,
        ties,
        loaded.side_files,
    )
    target.refuse(planned, options)
    scaled = {t.name for t in tasks if t.config.method.folds}
    if scaled and not target.own:
        FOLDINGS.get(_SCALE).refuse_unlike(_folds(loaded, scaled, depth), tasks)
    layers = {layer.name: layer for layer in planned.layers}
    gate.readers(format_name, layers, system.name, loaded.side_files, options, dense)


def _other_tensors(model: nn.Module, layers: set[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the types of unchanged tensors by their first name, and the further names of tied tensors."""
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
    return dense | {name: tensor.dtype for name, tensor in beside(model).items()}, ties


def _stand_in(task: Task) -> QuantizedLayer:
    """Return one row of the layer of a task: zero codes, scales of 1."""
    p, grid = task.parameter, task.config.method.make_grid(task.config.grid)
    groups = grid.n_groups(p.in_features)
    codes = np.zeros((1, p.in_features), grid.dtype)
    zeros = None if grid.symmetric else np.zeros((1, groups), grid.zeros_dtype)
    scales = np.ones((1, groups), np.float32)
    return QuantizedLayer(task.name, grid, codes, scales, zeros, p.orientation)


def _run(checkpoint: Checkpoint, proof: Proof) -> tuple[LoadedModel, Batch, NDArray[Any]]:
    """Model of a checkpoint, prompts, and its logits at the depth of the checkpoint."""
    require("torch")  # first, so that its absence is the reason
    try:
        loaded = load_checkpoint(checkpoint, trust_remote_code=proof.trust_remote_code)
    except SystemContractError:
        # A model without a loop can be exported as it is. Its layers run once.
        config = config_of(checkpoint.side_files)
        if checkpoint.layers or LOOP in config or not isinstance(config.get("num_hidden_layers"), int):
            raise
        once = json.dumps(with_loop(config, [0, config["num_hidden_layers"], 1])).encode()
        checkpoint = dataclasses.replace(checkpoint, side_files={**checkpoint.side_files, CONFIG: once})
        loaded = load_checkpoint(checkpoint, trust_remote_code=proof.trust_remote_code)
    batch = _random_batch(loaded, proof.n_prompts, proof.seq_len)
    n_steps = int(checkpoint.settings.get("n_steps") or loaded.system.n_steps)
    return loaded, batch, _rolled_out(loaded, batch, n_steps)


def _rolled_out(loaded: LoadedModel, batch: Batch, n_steps: int) -> NDArray[Any]:
    with require("torch").no_grad():
        logits: NDArray[Any] = loaded.system.rollout(batch, n_steps).float().cpu().numpy()
    return logits


def expected_of(loaded: LoadedModel, ids: Tensor) -> Expectation | None:
    """Return what engines must say of a model at its own depth, without any slack.

    None if the model draws a first state that its system does not tell, so that no engine can begin with it.
    """
    system = loaded.system
    # An engine is given the first states, or draws them itself: token by token, those of prompt 0.
    batch, draw = Batch(ids, (0,) * len(ids), by_token=True), getattr(system, "noise", None)
    if system.state_is_random and draw is None:
        return None
    states = draw(batch).float().cpu().numpy() if system.state_is_random and draw else None
    return Expectation(ids.numpy(), _rolled_out(loaded, batch, system.n_steps), states=states)


def round_weights(loaded: LoadedModel, expected: Expectation) -> float:
    """Round the weights of a model to float16 in place, and return the largest change of the expected logits."""
    torch = require("torch")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.copy_(parameter.half())
    batch = Batch(torch.from_numpy(expected.ids), (0,) * len(expected.ids), by_token=True)
    return float(np.abs(_rolled_out(loaded, batch, loaded.system.n_steps) - expected.expected).max())


def _random_batch(loaded: LoadedModel, n_prompts: int, seq_len: int) -> Batch:
    """Random prompts, the same for each model of a vocabulary."""
    torch = require("torch")
    vocabulary = int(loaded.config.get("vocab_size", 256))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(vocabulary, 4), vocabulary, (n_prompts, seq_len), generator=generator)
    return Batch(ids, tuple(range(n_prompts)))
