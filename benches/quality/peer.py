"""One method on one model, in the environment of its tool: `python -m benches.quality.peer JOB.json`.

JOB names the tool, the model, its prompts and the results to make. For each result the file `NUMBER.npz` with
the dequantized weights is written beside it. A line of JSON gives CPU seconds and peak memory, or the reason
of a refusal. Every tool calibrates on rollouts of the same prompts from the same initial states, one prompt
at a time.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benches.quality.exl3 import on_processor, solved
from benches.quality.peak import Peak
from benches.quality.subjects import prepare
from loopq.errors import LoopqError
from loopq.paper.models import PreparedModel, Sizes

#: How often the number of a call stands in the place of token ids.
N_REPEATED = 8
Weights = dict[str, np.ndarray]
Method = Callable[["Subject", int, int], Weights]


class Subject:
    """A model, its prompts, and the weights to quantize."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.model: PreparedModel = prepare(
            job["model"],
            Sizes(**job["sizes"]),
            Path(job["data"]) if job["data"] else None,
            job["draw"],
            job["texts"],
            job["dtype"],
        )
        self.system = self.model.loaded.system
        self.batches = list(self.model.calibration.batches(1))

    def module(self, name: str) -> nn.Linear:
        """The linear module of a weight."""
        linear = self.system.model.get_submodule(name.removesuffix(".weight"))
        if type(linear) is not nn.Linear:
            raise LoopqError(f"{name}: {type(linear).__name__}, and this tool takes nn.Linear")
        return linear

    def modules(self, group: int) -> dict[str, nn.Linear]:
        """The modules to quantize; a width that is no multiple of the group is refused, as the tools do.

        A narrower one has one scale per row, as in loopq.
        """
        linears = {name: self.module(name) for name in self.job["names"]}
        for name, module in linears.items():
            if 0 < group < module.in_features and module.in_features % group:
                raise LoopqError(f"{name}: {module.in_features} inputs are no multiple of {group}")
        return linears

    def blocks(self) -> list[str]:
        """Class names of the members of module lists: the tools treat these as the layers of a model."""
        lists = [m for m in self.system.model.modules() if isinstance(m, nn.ModuleList)]
        return sorted({type(block).__name__ for blocks in lists for block in blocks})

    @property
    def takes_ids(self) -> bool:
        """Whether a prompt is token ids, and not a call with other arguments."""
        return self.batches[0].call is None

    def roll(self, number: int) -> torch.Tensor:
        """One rollout of a calibration prompt."""
        return self.system.rollout(self.batches[number], self.system.n_steps)


@contextlib.contextmanager
def wrapped(subject: Subject, by_ids: bool = False) -> Iterator[nn.Module]:
    """The model as Hugging Face would hand it over: called with a prompt's number, or with its ids."""
    from transformers import PretrainedConfig, PreTrainedModel

    class Wrapped(PreTrainedModel):  # type: ignore[misc]
        config_class = PretrainedConfig
        _no_split_modules = subject.blocks()

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.inner = subject.system.model

    class ByNumber(Wrapped):
        # A tool that cuts prompts to a length gets the number as often.
        def forward(self, input_ids, attention_mask=None, use_cache=False):  # type: ignore[no-untyped-def]
            return subject.roll(int(input_ids.flatten()[0]))

    class ByIds(Wrapped):
        # Tools trace this one. Prompts have one length, so that a mask masks nothing.
        def forward(self, input_ids, attention_mask=None, use_cache=False):  # type: ignore[no-untyped-def]
            return self.inner(input_ids)

    with tempfile.TemporaryDirectory() as folder:
        # A tool opens the configuration once more by the model's path; nothing of it is used.
        (Path(folder) / "config.json").write_text('{"model_type": "gpt2"}')
        yield (ByIds if by_ids else ByNumber)(PretrainedConfig(name_or_path=folder))


def llmcompressor(
    observer: str | None,
    order: str | None = "default",
    pipeline: str = "basic",
    preset: str | None = None,
    bare: bool = False,
) -> Method:
    """GPTQModifier by `oneshot`; pipeline "basic" sums over all calls of a weight. `preset` replaces the
    scheme, and `bare` gives the module without a wrapper."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from torch.utils.data import DataLoader

    def quantize(subject: Subject, bits: int, group: int) -> Weights:
        modules = subject.modules(group)
        # By default the modifier uses the order "static".
        chosen = {} if order == "default" else {"actorder": order}
        schemes = {}
        for size in {size_of(m, group) for m in modules.values()}:
            same = [n.removesuffix(".weight") for n, m in modules.items() if size_of(m, group) == size]
            targets = same if bare else [f"inner.{n}" for n in same]
            grid = {"strategy": "channel"} if size < 0 else {"strategy": "group", "group_size": size}
            args = QuantizationArgs(num_bits=bits, symmetric=True, observer=observer, **grid)
            schemes[str(size)] = QuantizationScheme(targets=targets, weights=args)
            if preset is not None:
                schemes[str(size)] = preset_name_to_scheme(preset, targets)
                weights = schemes[str(size)].weights
                weights.observer = observer or weights.observer
        recipe = GPTQModifier(config_groups=schemes, **chosen)
        by_ids = pipeline != "basic"
        data: list[Any] = [b.input_ids for b in subject.batches]
        if not by_ids:
            data = [torch.tensor(i) for i in range(len(data))]
        given = [{"input_ids": x} for x in data]
        if bare:
            given = [dict(b.call.kwargs) if b.call else {"input_ids": b.input_ids} for b in subject.batches]
        loader = DataLoader(given, batch_size=1, collate_fn=lambda x: x[0])
        with contextlib.nullcontext(subject.system.model) if bare else wrapped(subject, by_ids) as model:
            oneshot(model=model, dataset=loader, recipe=recipe, pipeline=pipeline, processor=Processor())
        return weights_of(modules)

    return quantize


class Processor:
    """The prompts are numbers already."""

    def save_pretrained(self, folder: str) -> None:
        """Nothing is saved."""


def gptqmodel(exl3: bool = False) -> Method:
    """GPTQ of GPTQModel at its defaults, its sums fed by all calls: its own loop knows no module called twice.

    Its EXL3 has the same sums, and no groups.
    """
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    def quantize(subject: Subject, bits: int, group: int) -> Weights:
        if exl3 and group:
            raise LoopqError(f"EXL3 has no groups, got {group}; give {bits}:0")
        modules = subject.modules(group)
        tasks, hooks = {}, []
        for name, module in modules.items():
            size = -1 if exl3 else size_of(module, group)
            settings = {"group_size": size} | ({"act_group_aware": False} if size < 0 else {})
            task = tasks[name] = GPTQ(module, QuantizeConfig(bits=bits, **settings))
            task.quantizer.configure(perchannel=True)
            task.fallback = None

            def add(_: nn.Module, inputs: Any, out: torch.Tensor, task: Any = task) -> None:
                task.add_batch(inputs[0].detach(), out.detach())

            hooks.append(module.register_forward_hook(add))
        for number in range(len(subject.batches)):
            subject.roll(number)
        for hook in hooks:
            hook.remove()
        if exl3:
            with on_processor(bits) as quantizer:
                return {
                    name: solved(quantizer, modules[name].weight, task.finalize_hessian(), bits)
                    for name, task in tasks.items()
                }
        return {name: task.quantize(blocksize=128)[0].float().cpu().numpy() for name, task in tasks.items()}

    return quantize


def hqq() -> Method:
    """HQQ, which sees no activations and stores zero points besides: 16 / group more bits a weight."""
    from hqq.core.quantize import Quantizer

    def quantize(subject: Subject, bits: int, group: int) -> Weights:
        weights = {}
        for name, module in subject.modules(group).items():
            codes, meta = Quantizer.quantize(
                module.weight.detach().float(),
                nbits=bits,
                group_size=min(group, module.in_features),
                axis=1,
                optimize=True,
                device="cpu",
                compute_dtype=torch.float32,
            )
            weights[name] = Quantizer.dequantize(codes, meta).float().numpy().reshape(module.weight.shape)
        return weights

    return quantize


def autoround(n_iterations: int = 200) -> Method:
    """SignRound of auto-round, on the samples that there are: 200 iterations by default, 1,000 by its recipe "best"."""
    from auto_round import AutoRound

    def quantize(subject: Subject, bits: int, group: int) -> Weights:
        modules = subject.modules(group)
        ids = [b.input_ids for b in subject.batches]
        if not subject.takes_ids:
            ids = [torch.full((1, N_REPEATED), number) for number in range(len(ids))]
        data = [{"input_ids": x} for x in ids]
        narrow = {
            f"inner.{n.removesuffix('.weight')}": {"bits": bits, "group_size": -1, "sym": True}
            for n, m in modules.items()
            if size_of(m, group) < 0 < group
        }
        with wrapped(subject, by_ids=subject.takes_ids) as model:
            tuned = AutoRound(
                model,
                tokenizer=Processor(),
                bits=bits,
                group_size=group,
                sym=True,
                dataset=data,
                nsamples=len(data),
                seqlen=data[0]["input_ids"].shape[1],
                iters=n_iterations,
                device_map="cpu",
                layer_config=narrow or None,
            )
            tuned.quantize()
            tuned_modules = dict(tuned.model.named_modules())
        return weights_of({name: tuned_modules[f"inner.{name.removesuffix('.weight')}"] for name in modules})

    return quantize


def size_of(module: nn.Linear, group: int) -> int:
    """Group size of a module; -1 is a row."""
    return -1 if module.in_features < group else group


def weights_of(modules: dict[str, nn.Linear]) -> Weights:
    """Weights of some modules, as they are left."""
    return {name: module.weight.detach().float().numpy() for name, module in modules.items()}


TOOLS: dict[str, dict[str, Callable[[], Method]]] = {
    "llmcompressor": {
        "llm-compressor": lambda: llmcompressor(None),
        "llm-compressor, mse": lambda: llmcompressor("memoryless_mse"),
        "llm-compressor, imatrix_mse": lambda: llmcompressor("imatrix_mse"),
        "llm-compressor, no order": lambda: llmcompressor(None, None),
        "llm-compressor, no wrapper": lambda: llmcompressor(None, bare=True),
        "llm-compressor, default pipeline": lambda: llmcompressor(None, pipeline="independent"),
    },
    "gptqmodel": {"GPTQModel": gptqmodel, "GPTQModel, EXL3": partial(gptqmodel, exl3=True)},
    "autoround": {"auto-round": autoround, "auto-round, best": partial(autoround, 1000)},
    "hqq": {"HQQ": hqq},
}
#: Floats of 4 bits by llm-compressor, for `benches.gguf`.
FLOATS: dict[str, Callable[[], Method]] = {
    f"{kind}, {observer}": partial(llmcompressor, f"memoryless_{observer}", preset=f"{kind}A16")
    for kind in ("NVFP4", "MXFP4")
    for observer in ("minmax", "mse")
}


def main() -> None:
    """Run a job; each result starts from the stored model."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    torch.set_num_threads(job["threads"])
    answers, sys.stdout = sys.stdout, sys.stderr  # what the libraries print is no answer
    peak: Peak | None = None
    for number, (variant, bits, group) in enumerate(job["results"]):
        line: dict[str, Any] = {"variant": variant, "bits": bits, "group": group}
        try:
            method = (FLOATS | TOOLS[job["tool"]])[variant]()
            subject = Subject(job)
            peak = peak or Peak()
            peak.restart()
            began = time.process_time()
            weights: dict[str, Any] = method(subject, bits, group)
            line |= {"seconds": time.process_time() - began, "memory_mib": peak.mib()}
            np.savez(path.with_name(f"{number}.npz"), **weights)
        except Exception as error:  # noqa: BLE001
            # A tool's refusal belongs in the record, and the next result may succeed.
            line["refused"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        print(json.dumps(line), file=answers, flush=True)


if __name__ == "__main__":
    main()
