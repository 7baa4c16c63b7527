"""SenseNova-Loop's published shape, of layers of Qwen3-Next: one list with a looped middle, two residual streams.

The vendor's own code is not public. `loop_settings` are its keys. A float32 router mixes the streams: it says for every
token how much of each a layer reads, and how much of its output each gets.
"""

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3NextConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_next import modeling_qwen3_next as qwen


class StreamsConfig(Qwen3NextConfig):
    model_type = "loopq_test_streams"
    loop_settings: dict | None = None


class Streams(nn.Module):
    """Layers, each with a router, of which those from `start` to `end` run `eval_count` times."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(qwen.Qwen3NextDecoderLayer(config, i) for i in numbers)
        self.routers = nn.ModuleList(nn.Linear(config.hidden_size, 4, bias=False) for _ in numbers)
        self.norm = qwen.Qwen3NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = qwen.Qwen3NextRotaryEmbedding(config)
        loop = config.loop_settings
        self.order = list(numbers)
        self.order[loop["start"] : loop["end"]] *= loop["eval_count"]

    def forward(self, input_ids, config):
        x = self.embed_tokens(input_ids)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=config, inputs_embeds=x, attention_mask=None, cache=None, position_ids=positions
        )
        angles = self.rotary_emb(x, positions)
        streams = torch.stack((x, x), 2)
        for i in self.order:
            full = config.layer_types[i] == "full_attention"
            read, write = self.routers[i](streams.mean(2).float()).unflatten(-1, (2, 2)).unbind(2)
            entry = (streams * read.softmax(-1)[..., None].to(x.dtype)).sum(2)
            out = self.layers[i](
                entry,
                position_embeddings=angles,
                position_ids=positions,
                attention_mask=mask if full else None,
            )
            streams = streams + (out - entry)[:, :, None] * write.sigmoid()[..., None].to(x.dtype)
        return self.norm(streams.sum(2))


class StreamsForCausalLM(PreTrainedModel):
    config_class = StreamsConfig
    _keep_in_fp32_modules_strict = ("routers",)

    def __init__(self, config):
        super().__init__(config)
        self.model = Streams(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, use_cache=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, self.config)))
