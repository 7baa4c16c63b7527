"""A model of loopq's zoo as transformers loads it: same tensor names, the start state drawn from seed 0."""

from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from loopq import zoo


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
        inner = zoo.model_class(config.zoo["model_type"]).from_config(config.zoo)
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
        return CausalLMOutputWithPast(logits=self._rollout(input_ids, seed=0))
