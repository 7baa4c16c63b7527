"""lm-evaluation-harness runs models and checkpoints of loopq: ``lm-eval run --model loopq --model_args path=DIR``.

The entry point `lm_eval.models` makes the name known to harnesses of 2026-09 and later; with earlier ones
`import loopq.harness` does, before `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loopq.api import load
from loopq.checkpoint.convert import is_checkpoint
from loopq.generate import Decoder, Generation, context_length, decode, end_ids, generate
from loopq.lazy import require
from loopq.systems.base import Batch
from loopq.systems.load import LoadedModel, load_model

require("lm_eval")

import torch  # noqa: E402  after the message that names the extra
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402

#: What stands before a text for a model without a token of its own for it: a line's end.
_NEWLINE = 10
_LONGEST = 2048


@register_model("loopq")
class LoopqLM(LM):  # type: ignore[misc]  # lm_eval is untyped here
    """A causal looped model, in full precision or quantized, at any depth.

    Parameters
    ----------
    path : str
        Checkpoint of any format that loopq reads, embedded model, folder or hub id.
    n_steps : int, optional
        Depth; the model's own when absent.
    seed : int
        Seed of the initial states, where the model draws them.
    batch_size : int
        Texts of one length that run together; there is no padding.
    max_length : int, optional
        Longest text in tokens; what the model's configuration says, or 2048.
    device : str
        Device of the model.
    trust_remote_code : bool
        Allow code that comes with the model to run.
    max_batch_size : int, optional
        Handed over by the harness; has no meaning here.

    Raises
    ------
    ConfigError
        The model is not causal.
    """

    def __init__(
        self,
        path: str,
        n_steps: int | None = None,
        seed: int = 0,
        batch_size: int = 1,
        max_length: int | None = None,
        device: str | None = "cpu",
        trust_remote_code: bool = False,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.loaded = _open(path, device or "cpu", trust_remote_code)
        self.system, self.seed, self.batch_size = self.loaded.system, int(seed), int(batch_size)
        self.n_steps = self.system.check_depth(int(n_steps) if n_steps else self.system.n_steps)
        self.max_length = int(max_length) if max_length else context_length(self.loaded.model) or _LONGEST
        self._decoder = Decoder(self.system, self.n_steps, Generation(seed=self.seed))

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is the most probable one."""
        return self._scored([self._encoded(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood of whole texts, every token after as many others as the model takes."""
        found = []
        for request in requests:
            parts = list(_windows(self.loaded.encode(request.args[0]), self._prefix, self.max_length))
            found.append(sum(score for score, _ in self._scored(parts)))
        return found

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Text after each context, up to a stop string or a number of tokens."""
        return [self._text(*request.args) for request in requests]

    @property
    def _prefix(self) -> int:
        tokenizer = self.loaded.tokenizer
        own = getattr(tokenizer, "bos_token_id", None)
        return next((i for i in (own, *sorted(end_ids(self.loaded))) if i is not None), _NEWLINE)

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, cut where the context's own ids end; spaces between them go with the continuation."""
        stripped = context.rstrip()
        whole = list(self.loaded.encode(context + continuation))
        first = list(self.loaded.encode(stripped))
        return (first, whole[len(first) :]) if first else ([self._prefix], whole)

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        texts = [[*context, *continuation][-self.max_length - 1 :] for context, continuation in pairs]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        scores: dict[int, tuple[float, bool]] = {}
        while order:
            length = len(texts[order[0]])
            batch = [i for i in order[: self.batch_size] if len(texts[i]) == length]
            order = order[len(batch) :]
            ids = torch.tensor([texts[i] for i in batch])
            with torch.no_grad():
                logits = self.system.rollout(
                    Batch(ids[:, :-1], (0,) * len(batch), self.seed, True), self.n_steps
                )
            for row, i in enumerate(batch):
                n = min(len(pairs[i][1]), length - 1)
                told, target = logits[row, -n:].float().log_softmax(-1).cpu(), ids[row, -n:]
                greedy = bool((told.argmax(-1) == target).all())
                scores[i] = float(told.gather(-1, target[:, None]).sum()), greedy
        return [scores[i] for i in range(len(texts))]

    def _text(self, context: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        drawn = bool(options.get("do_sample"))
        settings = Generation(
            n_tokens=min(int(options.get("max_gen_toks", 256)), self.max_length - 1),
            temperature=float(options.get("temperature", 1.0)) if drawn else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            seed=self.seed,
        )
        prompt = list(self.loaded.encode(context)) or [self._prefix]
        prompt = self.system.prompt_ids(prompt[-(self.max_length - settings.n_tokens) :])
        self._decoder.restart()
        ids: list[int] = []
        for token in generate(self.loaded, prompt, self._decoder, settings):
            ids.append(token)
            text = decode(self.loaded, ids)
            if any(stop in text for stop in stops):
                break
        text = decode(self.loaded, ids)
        return text[: min([len(text), *(text.index(stop) for stop in stops if stop in text)])]


def _open(path: str, device: str, trust_remote_code: bool) -> LoadedModel:
    if not is_checkpoint(Path(path)):
        return load_model(path, device=device, trust_remote_code=trust_remote_code)
    loaded = load(path, quantized=True, trust_remote_code=trust_remote_code)
    loaded.model.to(device)
    return loaded


def _windows(ids: Sequence[int], prefix: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of context and continuation that score every token once, each input of `length` tokens at most."""
    yield [prefix], list(ids[:length])
    for start in range(length, len(ids), length):
        end = min(start + length, len(ids))
        yield list(ids[end - length - 1 : start]), list(ids[start:end])
