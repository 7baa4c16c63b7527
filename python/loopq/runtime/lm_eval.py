"""Run models and checkpoints of loopq in lm-evaluation-harness: ``lm-eval run --model loopq --model_args path=DIR``.

The entry point `lm_eval.models` registers the name with harnesses of 2026-09 and later. For earlier ones, `import
loopq.runtime.lm_eval` before `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loopq.errors import require
from loopq.models.restore import open_any
from loopq.runtime.generate import Decoder, Generation
from loopq.runtime.requests import (
    Request,
    encode_pair,
    generate_until,
    log_likelihoods,
    longest_input,
    prefix_id,
)
from loopq.settings.execution import Execution

require("lm_eval")

from lm_eval.api.model import LM  # noqa: E402  after the message that names the extra
from lm_eval.api.registry import register_model  # noqa: E402


@register_model("loopq")
class LoopqLM(LM):  # type: ignore[misc]  # lm_eval is untyped here
    """A causal looped model, in full precision or quantized, at any depth.

    Parameters
    ----------
    path : str
        Checkpoint of any format that loopq reads, embedded model, folder or hub id.
    n_steps : int, optional
        Depth. The model's default when absent.
    seed : int
        Seed of the initial states, where the model draws them.
    batch_size : int
        Number of texts of equal length per batch. There is no padding.
    max_length : int, optional
        Longest text in tokens. The default is the limit in the model's configuration, or 2048.
    device : str
        Device of the model.
    trust_remote_code : bool
        Allow code that comes with the model to run.
    max_batch_size : int, optional
        Passed by the harness and ignored.

    Raises
    ------
    ConfigError
        If the model is not causal.
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
        self.loaded = open_any(
            path, quantized=True, device=device or "cpu", trust_remote_code=trust_remote_code
        )
        system, self.seed, self.batch_size = self.loaded.system, int(seed), int(batch_size)
        self.n_steps = system.check_depth(int(n_steps) if n_steps else system.n_steps)
        self.max_length = int(max_length) if max_length else longest_input(self.loaded)
        self._decoder = Decoder(system, self.n_steps, Generation(seed=self.seed))

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation after its context, and whether it is the most probable one."""
        return self._scored([encode_pair(self.loaded, *request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood of whole texts. Every token has as much context as the model accepts."""
        prefix = [prefix_id(self.loaded)]
        pairs = [(prefix, self.loaded.encode(request.args[0])) for request in requests]
        return [score for score, _ in self._scored(pairs)]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Text after each context, up to a stop string or a number of tokens."""
        return [self._text(*request.args) for request in requests]

    def _scored(self, pairs: Sequence[Request]) -> list[tuple[float, bool]]:
        return log_likelihoods(
            self.loaded,
            pairs,
            n_steps=self.n_steps,
            longest=self.max_length,
            execution=Execution(seed=self.seed, batch_size=self.batch_size),
        )

    def _text(self, context: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        drawn = bool(options.get("do_sample"))
        settings = Generation(
            n_tokens=int(options.get("max_gen_toks", 256)),
            temperature=float(options.get("temperature", 1.0)) if drawn else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            seed=self.seed,
        )
        return generate_until(self.loaded, context, self._decoder, settings, stops, self.max_length)
