"""GPT-NeoX: transformers 5 calls the head by another name than the files."""

from __future__ import annotations

from loopq.formats.layouts import LAYOUTS, FileLayout

LAYOUTS.register("gpt_neox")(FileLayout(renamed=((r"^embed_out$", "lm_head"),)))
