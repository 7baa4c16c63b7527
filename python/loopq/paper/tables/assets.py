"""Li, Table 26: checkpoints, data and tools of the paper with licences and revisions. It needs no model."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable

TITLE = "Licences of checkpoints, data and tools"
APACHE, UNSTATED = "Apache-2.0", "checkpoint terms not stated; code {}"
# Hub id, revision where the paper fixes one, licence as stated by the source.
CHECKPOINTS = (
    ("tomg-group-umd/huginn-0125", "0f0fa0ba5cf9d3daad2db05811412af74d111904", APACHE),
    ("smcleish/Recurrent-Llama-3.2-train-recurrence-32", "a5f6f126e9d9302445346844f1d7d29d111a06eb", APACHE),
    ("ByteDance/Ouro-1.4B", "574fa66cb8bf5abdc979642d01cf2b79b16bfab1", APACHE),
    ("ByteDance/Ouro-2.6B", "1ed04250da1a9936042725d302e81c8fa2ab5abd", APACHE),
    ("zeng123/PonderingPythia-2.8B", "5bd111c10a7283e4afd672cca15a54666a41d0f6", APACHE),
    ("Nanbeige/Nanbeige4.2-3B-Base", "4a38e817c14b9f2c4b69b1e05cbda90395872f6b", APACHE),
    ("state-spaces/mamba-130m-hf", None, UNSTATED.format(APACHE)),
    ("state-spaces/mamba-2.8b-hf", None, UNSTATED.format(APACHE)),
    (
        "armenjeddi/LoopFormer-3block-8iterations-FineWeb300K",
        "e7c87640da4b7a2315b720b3f9c1c068432f4663",
        UNSTATED.format("MIT"),
    ),
    ("SandyResearch/parcae-140m", "236739ce93ba1afc1b3f172fb4a509f4500d2852", UNSTATED.format("MIT")),
    ("SandyResearch/parcae-1.3b", "517f8e6add927e3d73e15beec13a5b500537b9cc", UNSTATED.format("MIT")),
    ("Onlydrinkwater/gpt2-coconut-checkpoint14", None, UNSTATED.format("MIT")),
)
DATA = (
    ("GSM8K", "MIT"),
    ("WikiText-2", "CC BY-SA 3.0, also GFDL"),
    ("LAMBADA", "modified MIT"),
    ("ARC-Challenge", "CC BY-SA 4.0"),
    ("HellaSwag", "MIT"),
)
TOOLS = (
    ("lm-eval-harness", "MIT"),
    ("GPTQ and Marlin of IST-DASLab", APACHE),
    ("PyTorch", "BSD-3-Clause"),
    ("transformers", APACHE),
)


def show(results: Sequence[Found]) -> Shown:
    """All assets. A revision can be passed to `--revision` of loopq's commands."""
    rows = [("checkpoint", *cells) for cells in CHECKPOINTS]
    rows += [("data", name, None, licence) for name, licence in DATA]
    rows += [("tool", name, None, licence) for name, licence in TOOLS]
    text = "As the paper states them; none of these ships with loopq (NOTICE has what does)."
    return Shown([ShownTable(TITLE, text, ("kind", "name", "revision", "licence"), tuple(rows))])


TABLES.register("assets")(
    PaperTable(("Table 26",), TITLE, "Licences and pinned revisions, repeated here.", None, show)
)
