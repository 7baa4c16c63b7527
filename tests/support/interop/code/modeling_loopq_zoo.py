"""The embedded model's class as transformers loads it: same tensor names, the start state drawn from seed 0."""

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from loopq.zoo.huginn import HuginnConfig, SmallHuginn


class LoopqZooConfig(PretrainedConfig):
    model_type = "loopq_zoo_wrapper"

    def __init__(self, zoo=None, tie_word_embeddings=True, **kwargs):
        self.zoo = dict(zoo or {})
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class LoopqZooForCausalLM(PreTrainedModel):
    config_class = LoopqZooConfig
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config):
        super().__init__(config)
        inner = SmallHuginn(HuginnConfig.from_dict(config.zoo))
        for name, child in inner.named_children():
            setattr(self, name, child)
        # Kept out of the module tree: its children are the wrapper's own, under the names of the checkpoint.
        object.__setattr__(self, "_rollout", inner)
        self.post_init()

    def get_input_embeddings(self):
        return self.transformer["wte"]

    def get_output_embeddings(self):
        return self.lm_head

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, use_cache=None, **kwargs):
        for name, child in self.named_children():
            setattr(self._rollout, name, child)
        if self._rollout.freqs_cis.is_meta:
            # transformers 5 builds models without memory and fills what the checkpoint has: not this table.
            config = self._rollout.config
            self._rollout.add_rotary(config.n_embd // config.n_heads)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            logits = self._rollout(input_ids).logits
        return CausalLMOutputWithPast(logits=logits)
