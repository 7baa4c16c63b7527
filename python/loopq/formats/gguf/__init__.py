"""GGUF: one file of llama.cpp. Spec: docs/formats/gguf.md.

| file | holds |
| --- | --- |
| `file` | reading of any GGUF file, through the package `gguf` |
| `shape` | base of the architectures: names of tensors, order of rows and layers, keys of the header |
| `sentencepiece`, `pretokens`, `tokenizer` | the tokenizer among a model's files, in the terms of llama.cpp |
| `encoding` | check of a tokenizer by encoding strings |
| `vocabulary` | keys of the tokenizer |
| `model` | the format |

Each of the others is an architecture of llama.cpp.
"""

from loopq.formats.gguf.model import GGUF, blocks

__all__ = ["GGUF", "blocks"]
