"""COCONUT on GPT-2: the last hidden state becomes the next position's input embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loopq.errors import ConfigError, SystemContractError, require
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.capabilities import ModelClass
from loopq.systems.declare import declare, is_embedding
from loopq.systems.outputs import cache_of, past
from loopq.systems.stepwise import SingleSteps

_MARKER = "base_causallm.transformer.h.0.attn.c_attn"
_LINEARS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attn.c_attn", {"role": "attention", "fused": "q+k+v"}),
    ("attn.c_proj", {"role": "attention"}),
    ("mlp.c_fc", {"role": "mlp"}),
    ("mlp.c_proj", {"role": "mlp"}),
)
_DEFAULT_LATENTS = 4


@SYSTEMS.register("coconut")
class Coconut(SingleSteps):
    """COCONUT around a GPT-2.

    A rollout of depth N has N-1 latent thoughts: `question <start> latent * (N-1) <end> answer`. Pass 0 runs question
    and start token. Each further pass runs the next latent. The last pass also runs end token and answer, so passes
    differ in rows. The logits are aligned with the given ids. At the question's last position they come from the end
    token and predict the answer.

    Ids that contain the start and end tokens are cut there. Otherwise the first `question_length` tokens are the
    question, by default half of them.
    """

    grows = True
    summary = "hidden state written to the next position's input; depth = latents + 1"
    published = Published(
        {"COCONUT GPT-2": 48},
        also=(
            "GPT-2's config.json with the vocab_size of the weights, and its tokenizer, beside them; "
            "then --system coconut --allow-pickle"
        ),
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.base = model.base_causallm
        self.start_id, self.end_id = int(model.start_latent_id), int(model.end_latent_id)
        self.question_length: int | None = None

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `base_causallm`, a GPT-2."""
        return _MARKER in dict(model.named_modules())

    @property
    def n_steps(self) -> int:
        """5 passes: the paper's four latents and the last pass."""
        return _DEFAULT_LATENTS + 1

    @classmethod
    def model_class(cls) -> ModelClass:
        """The published checkpoint is a state dict of the wrapper. Its ``config.json``, added by hand, is GPT-2's."""
        return ModelClass(build_coconut, rename=_published_names)

    def describe_loop(self) -> tuple[str, ...]:
        """The marks between question and answer."""
        return (f"latents stand between the tokens {self.start_id} (start) and {self.end_id} (end)",)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Four `Conv1D` of every block, stored (in, out): 48 of 12 blocks."""
        modules = [
            (f"base_causallm.transformer.h.{i}.{suffix}", fields)
            for i in range(len(self.base.transformer.h))
            for suffix, fields in _LINEARS
        ]
        if not is_embedding(self.model, "base_causallm.lm_head"):
            reason = "read at every pass, but no part of the feedback"
            head = {"role": "head", "treatment": "dense", "reason": reason}
            modules.append(("base_causallm.lm_head", head))
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """The head, if it is the embedding."""
        if is_embedding(self.model, "base_causallm.lm_head"):
            return {"base_causallm.lm_head.weight": "is the input embedding, which stays as it is"}
        return {}

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run question, latents and answer in `n_steps` passes that share keys and values."""
        with torch.set_grad_enabled(self.keeps_graph):
            return self._whole(self.to_device(batch.input_ids), self.check_depth(n_steps))[0]

    def prompt_ids(self, ids: Sequence[int]) -> list[int]:
        """Add the marks after a question without them."""
        marks = [] if self.start_id in ids else [self.start_id, self.end_id]
        return [*ids, *marks]

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue the answer with GPT-2's cache of question, latents and the answer so far."""
        ids = self.to_device(batch.input_ids)
        if cache is None:
            return self._whole(ids, n_steps)
        return self._pass(self.base.transformer.wte(ids[:, n_seen:]), cache)[1:]

    def n_updates(self, n_steps: int) -> int:
        """The number of latent thoughts. The last pass reads them."""
        return n_steps - 1

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor, bool]:
        """Question, answer, and whether the ids contained the marks between them."""
        return self._split(self.to_device(batch.input_ids))

    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """No thought, of shape (n_prompts, 0, width)."""
        weight = self.base.transformer.wte.weight
        return weight.new_zeros(len(embedding[0]), 0, weight.shape[1])

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """Append the next thought to those so far. It is read from a pass over question and thoughts, without cache."""
        first, _ = self._ends(embedding[0], embedding[1], state.shape[1] + 1)
        return torch.cat((state, self._pass(torch.cat((first, state), 1), None)[0][:, -1:]), 1)

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Logits of one pass over question, thoughts and answer."""
        first, last = self._ends(embedding[0], embedding[1], state.shape[1] + 1)
        logits = self._pass(torch.cat((first, state, last), 1), None)[1]
        return self._aligned(logits, embedding[0].shape[1], state.shape[1] + 1, embedding[2])

    def _whole(self, ids: Tensor, depth: int) -> tuple[Tensor, Any]:
        """Logits aligned with the ids, and the cache of all passes."""
        question, answer, marked = self._split(ids)
        embeds, tail = self._ends(question, answer, depth)
        done, cache = [], None
        for t in range(depth):
            piece = torch.cat((embeds, tail), 1) if t == depth - 1 else embeds
            hidden, logits, cache = self._pass(piece, cache)
            embeds = hidden[:, -1:]
            done.append(logits)
        return self._aligned(torch.cat(done, 1), question.shape[1], depth, marked), cache

    def _aligned(self, logits: Tensor, n_question: int, depth: int, marked: bool) -> Tensor:
        """Logits of question, start, latents, end and answer, cut to those of the ids."""
        kept = n_question + 1 if marked else n_question - 1
        return torch.cat((logits[:, :kept], logits[:, n_question + depth :]), 1)

    def _split(self, ids: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Return question, answer, and whether the ids contained the marks between them."""
        starts, ends = (ids == self.start_id), (ids == self.end_id)
        if not bool(starts.any()) and not bool(ends.any()):
            cut = max(1, ids.shape[1] // 2) if self.question_length is None else self.question_length
            if ids.shape[1] < cut:
                raise ConfigError(f"coconut: the question has {cut} tokens, the prompt only {ids.shape[1]}")
            return ids[:, :cut], ids[:, cut:], False
        columns = starts[0].nonzero().flatten().tolist()
        paired = bool((ends.roll(-1, 1) == starts).all()) and bool((starts == starts[0]).all())
        if len(columns) != 1 or not paired or columns[0] < 1:
            raise ConfigError(
                "coconut: prompts hold the start token directly before the end token, once, in the same "
                "column in all of a batch, after at least one token; the rollout makes the latents between"
            )
        return ids[:, : columns[0]], ids[:, columns[0] + 2 :], True

    def _ends(self, question: Tensor, answer: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Embeddings of question and start token, and of end token and answer."""
        table, rows = self.base.transformer.wte, question.shape[0]
        first = torch.cat((question, question.new_full((rows, 1), self.start_id)), 1)
        last = torch.cat((question.new_full((rows, 1), self.end_id), answer), 1)
        n_positions = int(self.base.transformer.wpe.weight.shape[0])
        if first.shape[1] + depth - 1 + last.shape[1] > n_positions:
            raise ConfigError(
                f"coconut: {question.shape[1] + answer.shape[1]} tokens, {depth - 1} latents and two marks "
                f"do not fit in {n_positions} positions"
            )
        return table(first), table(last)

    def _pass(self, embeds: Tensor, cache: Any) -> tuple[Tensor, Tensor, Any]:
        stack = self.base.transformer
        out = stack(inputs_embeds=embeds, **past(stack, cache))
        return out.last_hidden_state, self.base.lm_head(out.last_hidden_state), cache_of(out)


def wrap_gpt2(base: nn.Module, start_id: int, latent_id: int, end_id: int) -> nn.Module:
    """Wrap a GPT-2 causal model in the form of the published COCONUT wrapper.

    Parameters
    ----------
    base : GPT2LMHeadModel
        A model with the three tokens in its vocabulary.
    start_id, latent_id, end_id : int
        Ids of the start, latent and end tokens.

    Returns
    -------
    nn.Module
        A module with `base_causallm`, `embedding` and the three ids. Parameters have the names of the published
        checkpoint. It has no forward. `Coconut.rollout` is the rollout.
    """
    if _MARKER.removeprefix("base_causallm.") not in dict(base.named_modules()):
        raise SystemContractError(f"coconut: {type(base).__name__} is no GPT-2 with a language-model head")

    model = nn.Module()
    model.base_causallm, model.embedding, model.config = base, base.transformer.wte, base.config
    model.start_latent_id, model.latent_token_id, model.end_latent_id = start_id, latent_id, end_id
    return model.eval()


def build_coconut(config: dict[str, Any]) -> nn.Module:
    """Build the wrapper around an untrained GPT-2.

    Parameters
    ----------
    config : dict
        GPT-2's ``config.json``. It may name `start_latent_id`, `end_latent_id` and `latent_token_id`. The default is
        the last three ids of the vocabulary in this order, as the training code adds them.
    """
    transformers = require("transformers")
    settings = transformers.GPT2Config.from_dict(config)
    base = transformers.GPT2LMHeadModel(settings)
    base.tie_weights()
    last = int(settings.vocab_size)
    return wrap_gpt2(
        base,
        start_id=int(config.get("start_latent_id", last - 3)),
        end_id=int(config.get("end_latent_id", last - 2)),
        latent_id=int(config.get("latent_token_id", last - 1)),
    )


def _published_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """Bare GPT-2 files have no prefix, and older ones contain masks that are not weights."""
    kept = {k: v for k, v in tensors.items() if not k.endswith((".attn.bias", ".attn.masked_bias"))}
    prefixes = ("base_causallm.", "embedding.")
    return {k if k.startswith(prefixes) else f"base_causallm.{k}": v for k, v in kept.items()}
