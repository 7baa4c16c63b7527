"""Generate text token by token, with the model's cache if it gives the logits of a rollout."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from loopq.errors import ConfigError, NonFiniteError, require
from loopq.models.load import LoadedModel
from loopq.models.trace import first_not_finite
from loopq.runtime.backends import Job, close, opened
from loopq.settings.declare import Settings, setting
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Exits, FixedLength, marked
from loopq.systems.stepwise import steps_of

if TYPE_CHECKING:
    from torch import Tensor

#: Tokens of a run that is tried before anything is generated, and how many follow it one by one.
_PROBE, _MORE = 8, 3


@dataclass(frozen=True)
class Generation(Settings):
    """Settings of generation.

    Parameters
    ----------
    n_tokens : int
        Tokens to generate; fewer where the model ends its text.
    temperature : float
        Divides the logits before a token is drawn; 0: the most probable token.
    top_p : float
        Draw from the most probable tokens that together have this probability.
    seed : int
        Seed of the draws, and of the initial states where a model draws them.
    exit : float, optional
        Leave the loop early by the model's own rule: Ouro's gate at this cumulative probability, Huginn and R-Llama
        when two steps' predictions differ by less than this KL (nats). It runs without the cache.
    kv : {8, 4}, optional
        Bits of the keys and values that loopq's runner keeps. By default they have the type of the model.
    """

    n_tokens: int = setting(128, at_least=1, common=True)
    temperature: float = setting(0.0, at_least=0.0, common=True)
    top_p: float = setting(1.0, at_least=1e-6, at_most=1.0, common=True)
    seed: int = setting(0, at_least=0, common=True)
    exit: float | None = setting(None, at_least=0.0, common=True)
    kv: Literal[4, 8] | None = setting(None, common=True)


class Decoder:
    """Logits of the next token, for repeated calls on a growing text.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    n_steps : int
        Depth.
    settings : Generation
        Cache types and the early-exit threshold.

    Attributes
    ----------
    backend : loopq.runtime.backends.NextLogits
        Computes the logits. Its `name` is "runner" (the core runs the model as one program with its cache), "graph" (a
        recorded step is replayed), "cache" (loopq's or the model's own), "exit" (the loop is left early) or "rollout".
    declined : dict of str to str
        Backends that come before it, in this order, and why they are not used.
    depths : list of int
        Number of steps of each call.

    Raises
    ------
    ConfigError
        If the model is not causal or gives no logits, so that it cannot generate. Also if it has no early-exit rule, or
        the runner that `kv` needs does not run it.
    """

    def __init__(self, system: LoopedSystem, n_steps: int, settings: Generation) -> None:
        self.system, self.n_steps, self.settings = system, system.check_depth(n_steps), settings
        self.depths: list[int] = []
        self._seen: list[int] = []
        if system.output != "logits" or isinstance(system, FixedLength):
            what = "hidden states" if system.output != "logits" else "answers to prompts of one length"
            raise ConfigError(f"{system.name}: gives {what}, so there is no text to generate")
        vocabulary = self._refuse_two_directions()
        if settings.exit is not None and not (isinstance(system, Exits) and steps_of(system)):
            raise ConfigError(f"exit: {system.name} has no rule of its own for leaving the loop early")
        texts = self._growing(vocabulary)
        self.backend, self.declined = opened(
            Job(system, self.n_steps, texts, settings.n_tokens, settings.exit, settings.kv)
        )
        if settings.kv is not None and "runner" in self.declined:
            raise ConfigError(
                "kv: only loopq's runner keeps keys and values in fewer bits, and it is not used: "
                f"{self.declined['runner']}"
            )

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Logits after the last token, float32 (vocabulary).

        If the text continues the previous one, only the new tokens run.
        """
        now, seen = list(ids), self._seen
        n_seen = len(seen) if now[: len(seen)] == seen and len(now) > len(seen) else 0
        # An interrupted call leaves it empty, because its rest cannot be continued.
        self._seen = []
        batch = self._batch(now)
        with require("torch").no_grad():
            logits = self.backend.extend(batch, n_seen)
        self._seen = now
        self.depths.append(self.backend.depth)
        self._refuse_nan(logits, batch)
        return logits.float().cpu()

    def restart(self) -> None:
        """Clear the text so far."""
        self._seen = []

    def _batch(self, ids: Sequence[int]) -> Batch:
        torch = require("torch")
        return Batch(torch.tensor([list(ids)]), (0,), self.settings.seed, by_token=True)

    def _refuse_two_directions(self) -> int:
        """Check that another last token keeps the earlier logits. Return the size of the vocabulary."""
        known = getattr(getattr(self.system.model, "config", None), "vocab_size", _PROBE + 1)
        first = [1 + i % max(1, known - 1) for i in range(_PROBE)]
        with require("torch").no_grad():
            texts = (self._batch(first), self._batch((*first[:-1], int(first[-1] != 1))))
            a, b = (self.system.rollout(text, self.n_steps)[0, :-1] for text in texts)
        self._refuse_nan(a, texts[0])
        if not close(a, b):
            raise ConfigError(
                f"{self.system.name}: a later token changes the logits of earlier ones: "
                f"{type(self.system.model).__name__} reads in both directions and cannot generate text"
            )
        return int(a.shape[-1])

    def _refuse_nan(self, logits: Tensor, batch: Batch) -> None:
        """Check that logits are numbers below infinity, since others have no most probable token."""
        if bool((logits.isnan() | logits.isposinf()).any()):
            where = first_not_finite(self.system.model, lambda: self.system.rollout(batch, self.n_steps))
            raise NonFiniteError(
                f"{self.system.name}: the logits hold NaN or infinity; the first value that is not finite: {where}. "
                "Use float32 or another checkpoint"
            )

    def _growing(self, vocabulary: int) -> tuple[Batch, ...]:
        """A prompt, and the same with one token more, and so on."""
        # Spread out, because the first ids are often marks, after which logits depend on every rounding.
        apart = max(1, vocabulary // (_PROBE + _MORE + 1))
        tried = [i * apart % vocabulary for i in range(1, _PROBE + _MORE + 1)]
        start, more = marked(self.system, tried[:_PROBE]), tried[_PROBE:]
        return tuple(self._batch([*start, *more[:n]]) for n in range(_MORE + 1))


#: Temperatures below it draw the same token. Its reciprocal is finite.
_COLDEST = 1e-100


def choose(logits: Tensor, settings: Generation, generator: Any) -> int:
    """Choose a token id from float32 logits of shape (vocabulary,), by the temperature and top-p of the settings."""
    if settings.temperature == 0.0:
        return int(logits.numpy().argmax())
    # In double precision, below the largest, because a tiny temperature would overflow others.
    relative = (logits - logits.max()).double() / max(settings.temperature, _COLDEST)
    probability, order = relative.softmax(-1).sort(descending=True)
    # A token is kept while the earlier ones sum to less than top_p. The first one is always kept.
    kept = probability * (probability.cumsum(-1) - probability < settings.top_p)
    return int(order[kept.multinomial(1, generator=generator)])


def speed(system: LoopedSystem, n_steps: int, prompt: Sequence[int], n_tokens: int = 16) -> float | None:
    """Return tokens per second after a prompt, one at a time. None for a model without text generation.

    Half of the prompt's token ids are read first and at most `n_tokens` of the others are timed.
    """
    try:
        decoder = Decoder(system, n_steps, Generation())
    except ConfigError:
        return None
    first = max(1, len(prompt) // 2)
    ends = range(first + 1, min(len(prompt), first + n_tokens) + 1)
    decoder(prompt[:first])
    start = time.perf_counter()
    for end in ends:
        decoder(prompt[:end])
    return len(ends) / (time.perf_counter() - start) if ends else None


def end_ids(loaded: LoadedModel) -> frozenset[int]:
    """Tokens that end a text, as named by tokenizer, generation settings and configuration."""
    sources = (loaded.tokenizer, getattr(loaded.model, "generation_config", None))
    named = [getattr(source, "eos_token_id", None) for source in sources] + [
        loaded.config.get("eos_token_id")
    ]
    # The files are from outside, and anything else ends no text.
    each = (i for ids in named for i in (ids if isinstance(ids, list) else [ids]))
    return frozenset(i for i in each if isinstance(i, int))


def generate(
    loaded: LoadedModel, prompt: Sequence[int], decoder: Decoder, settings: Generation
) -> Iterator[int]:
    """Yield token ids one by one.

    Parameters
    ----------
    loaded : LoadedModel
        The model. Its positions and end tokens apply.
    prompt : sequence of int
        Token ids of the prompt.
    decoder : Decoder
        Gives the logits.
    settings : Generation
        Number of tokens, and the sampling rule.

    Yields
    ------
    int
        Next token. The last one precedes a token that ends the text.

    Raises
    ------
    ConfigError
        If prompt and requested tokens exceed the model's positions.
    """
    limit = loaded.context_length
    if limit is not None and len(prompt) + settings.n_tokens > limit:
        rest = limit - len(prompt)
        advice = f"at most {rest} here" if rest > 0 else "give a shorter prompt"
        raise ConfigError(
            f"n_tokens {settings.n_tokens}: with the prompt's {len(prompt)} tokens more than the {limit} positions of "
            f"the model; {advice}"
        )
    generator = require("torch").Generator().manual_seed(settings.seed)
    ends, ids = end_ids(loaded), list(prompt)
    for _ in range(settings.n_tokens):
        token = choose(decoder(ids), settings, generator)
        if token in ends:
            return
        yield token
        ids.append(token)
