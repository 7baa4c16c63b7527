"""Generate text token by token, with the model's cache if it gives the logits of a rollout."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from loopq.errors import ConfigError, LoopqError, NonFiniteError, require
from loopq.models.load import LoadedModel
from loopq.models.trace import first_not_finite
from loopq.runtime.graph import RECORDERS, Graph
from loopq.settings.declare import Settings, setting
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Exits, FixedLength, Programmed, ServedByCache, extended, marked
from loopq.systems.stepwise import single_steps, steps_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.runtime.runner import Runner  # lazy: loopq imports without torch

#: Tokens of a run that is tried before anything is generated, and how many follow it one by one.
_PROBE, _MORE = 8, 3
#: Largest difference from the logits of a rollout, relative to them (root mean square). In 16 bits, sums over
#: other shapes round otherwise, and a loop multiplies that.
_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 5e-2, "float16": 1e-2}


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
    no_cache : str
        Why every token is computed from all earlier tokens. Empty if there is a cache.
    no_runner : str
        Why the model's modules are called. Empty if the core runs it as one program with its cache.
    no_graph : str
        Why the operations of a step are launched one by one. Empty if a recorded step is replayed, or the core runs it.
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
        self._runner: Runner | None = None
        self._graph: Graph | None = None
        self._cache: Any = None
        self._seen: list[int] = []
        if system.output != "logits" or isinstance(system, FixedLength):
            what = "hidden states" if system.output != "logits" else "answers to prompts of one length"
            raise ConfigError(f"{system.name}: gives {what}, so there is no text to generate")
        vocabulary = self._refuse_two_directions()
        if settings.exit is not None and not (isinstance(system, Exits) and steps_of(system)):
            raise ConfigError(f"exit: {system.name} has no rule of its own for leaving the loop early")
        self.no_cache = self.no_runner = self.no_graph = "left early"
        if settings.exit is None:
            texts = self._growing(vocabulary)
            self.no_runner = self._why_no_runner(texts)
            self.no_graph = self._why_no_graph(texts) if self.no_runner else ""
            self.no_cache = self._why_no_cache(texts) if self.no_runner and self.no_graph else ""
        if settings.kv is not None and self.no_runner:
            raise ConfigError(
                f"kv: only loopq's runner keeps keys and values in fewer bits, and it is not used: {self.no_runner}"
            )

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Logits after the last token, float32 (vocabulary).

        If the text continues the previous one, only the new tokens run.
        """
        with require("torch").no_grad():
            if self.settings.exit is not None:
                logits = self._leave_early(self._batch(ids), self.settings.exit)
            else:
                logits = self._rolled_out(ids) if self.no_cache else self._extended(ids)
                self.depths.append(self.n_steps)
        self._refuse_nan(logits, self._batch(ids))
        return logits.float().cpu()

    def restart(self) -> None:
        """Clear the text so far."""
        self._seen, self._cache = [], None
        if self._runner is not None:
            self._runner.restart()

    def _batch(self, ids: Sequence[int]) -> Batch:
        torch = require("torch")
        return Batch(torch.tensor([list(ids)]), (0,), self.settings.seed, by_token=True)

    def _rolled_out(self, ids: Sequence[int]) -> Tensor:
        return self.system.rollout(self._batch(ids), self.n_steps)[0, -1]

    def _extended(self, ids: Sequence[int]) -> Tensor:
        """The same, from the keys and values of earlier tokens, in the runner's or the model's cache."""
        seen, now = self._seen, list(ids)
        # Also empty after an interrupted call, because its rest cannot be continued.
        if not seen or now[: len(seen)] != seen or len(now) == len(seen):
            self.restart()
        n_seen, self._seen = len(self._seen), []
        batch = self._batch(now)
        if self._runner is not None:
            states = self._runner.program.start
            logits = self._runner.extend(
                batch.input_ids[0, n_seen:], None if states is None else states(batch, n_seen)[0]
            )
        elif self._graph is not None:
            logits = self._graph.extend(batch, n_seen)
        else:
            every, self._cache = extended(self.system, batch, self.n_steps, n_seen, self._cache)
            logits = every[0, -1]
        self._seen = now
        return logits

    def _leave_early(self, batch: Batch, threshold: float) -> Tensor:
        """Logits at the step that the model's rule chooses for the last token. All tokens run to that step."""
        system, n_steps = single_steps(self.system), self.n_steps
        rule = system.exit_rule() if isinstance(system, Exits) else None
        embedding = system.embed(batch)
        state = system.initial_state(batch, embedding)
        for t in range(n_steps):
            state = system.step(state, embedding, t, n_steps)
            logits = system.predict(state, embedding)[0, -1]
            if rule is not None and rule(state[0, -1], logits, threshold):
                break
        self.depths.append(t + 1)
        return logits

    def _refuse_two_directions(self) -> int:
        """Check that another last token keeps the earlier logits. Return the size of the vocabulary."""
        known = getattr(getattr(self.system.model, "config", None), "vocab_size", _PROBE + 1)
        first = [1 + i % max(1, known - 1) for i in range(_PROBE)]
        with require("torch").no_grad():
            texts = (self._batch(first), self._batch((*first[:-1], int(first[-1] != 1))))
            a, b = (self.system.rollout(text, self.n_steps)[0, :-1] for text in texts)
        self._refuse_nan(a, texts[0])
        if not _close(a, b):
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

    def _growing(self, vocabulary: int) -> list[list[int]]:
        """A prompt, and the same with one token more, and so on."""
        # Spread out, because the first ids are often marks, after which logits depend on every rounding.
        apart = max(1, vocabulary // (_PROBE + _MORE + 1))
        tried = [i * apart % vocabulary for i in range(1, _PROBE + _MORE + 1)]
        start, more = marked(self.system, tried[:_PROBE]), tried[_PROBE:]
        return [[*start, *more[:n]] for n in range(_MORE + 1)]

    def _as_rolled_out(self, texts: Sequence[Sequence[int]]) -> bool:
        """Whether texts that continue each other have the logits of a rollout."""
        torch = require("torch")
        with torch.no_grad():
            logits = torch.stack([self._extended(text) for text in texts])
            whole = self.system.rollout(self._batch(texts[-1]), self.n_steps)[0, -len(texts) :]
        self.restart()
        return _close(logits, whole)

    def _why_no_runner(self, texts: Sequence[Sequence[int]]) -> str:
        """Test the core's runner, because it describes a model by the names of its modules."""
        system = self.system
        from loopq.runtime.linear import QuantLinear  # lazy: loopq imports without torch
        from loopq.runtime.runner import Runner  # lazy: loopq imports without torch

        coded = any(isinstance(m, QuantLinear) for m in system.model.modules())
        if system.device.type != "cpu" or not coded:
            return "the runner takes models with codes, on the processor"
        try:
            program = system.program(self.n_steps) if isinstance(system, Programmed) else None
            if program is None:
                return f"the runner does not know the blocks of {type(system.model).__name__}"
            self._runner = Runner(program)
            why = "" if self._as_rolled_out(texts) else "the runner gives other logits"
            if not why and self.settings.kv is not None:
                self._runner = Runner(program, self.settings.kv)
        except LoopqError as cause:
            why = str(cause)
        if why:
            self._runner = None
            self.restart()
        return why

    def _why_no_graph(self, texts: Sequence[Sequence[int]]) -> str:
        """Test a recorded step, because a recording repeats choices that depend on the tokens."""
        device = self.system.device.type
        if device not in RECORDERS:
            return f"loopq records steps on a GPU, not on {device}"
        self._graph = Graph(self.system, self.n_steps, self.settings.n_tokens)
        why = self._why_not(texts, "a recorded step")
        self._graph = None if why else self._graph
        return why

    def _why_no_cache(self, texts: Sequence[Sequence[int]]) -> str:
        """Test the model's cache. Published ones differ between versions, and some give other logits."""
        served = isinstance(self.system, ServedByCache) and self.system.served_by_cache
        return self._why_not(texts, "the model's own cache", served)

    def _why_not(self, texts: Sequence[Sequence[int]], what: str, served: bool = False) -> str:
        try:
            return "" if self._as_rolled_out(texts) or served else f"{what} gives other logits"
        except LoopqError as cause:
            return str(cause)
        # Any error of external code has the same meaning: this cannot be used here.
        except Exception as cause:  # noqa: BLE001
            return f"{what} cannot be used ({type(cause).__name__}: {cause})"
        finally:
            self.restart()


#: Temperatures below it draw the same token. Its reciprocal is finite.
_COLDEST = 1e-100


def _close(logits: Tensor, expected: Tensor) -> bool:
    tolerance = _TOLERANCE[str(expected.dtype).removeprefix("torch.")]
    return bool((logits - expected).float().norm() <= tolerance * expected.float().norm())


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
