"""lm-evaluation-harness itself, on local files and through loopq's plugin, gives every item the same score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loopq.paper.items import TASKS, read_items
from loopq.paper.tasks import score
from loopq.settings.execution import Execution

lm_eval = pytest.importorskip("lm_eval", reason="NOT RUN: lm-eval is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

PAGES = (" = A = \n \n It was a long day , and the sea was grey . \n ", ' = B = \n He said : " No " . \n')
ARC = {
    "question": "What is wet?",
    "choices": {"text": ["a stone", "water"], "label": ["A", "B"]},
    "answerKey": "B",
}
SWAG = {
    "activity_label": "Sea",
    "ctx_a": "A man rows.",
    "ctx_b": "he",
    "endings": ["sinks [title] now.", "sings"],
}
#: Of each task: the harness's own file of it, and records of each of its splits.
CASES: dict[str, tuple[str, dict[str, list[dict[str, Any]]]]] = {
    "lambada": (
        "lambada/lambada_openai.yaml",
        {"test": [{"text": f"He went to the sea and saw the {w}"} for w in ("s", "sea", "house")]},
    ),
    "arc_easy": ("arc/arc_easy.yaml", {"test": [ARC, {**ARC, "answerKey": "A"}]}),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        {"validation": [{**SWAG, "label": "0"}, {**SWAG, "label": "1"}]},
    ),
    "gsm8k": (
        "gsm8k/gsm8k.yaml",
        {
            "test": [{"question": q, "answer": "#### 4"} for q in ("Two and two?", "Five less one?")],
            "train": [{"question": f"{n} and {n}?", "answer": f"#### {2 * n}"} for n in range(8)],
        },
    ),
    "wikitext": ("wikitext/wikitext.yaml", {"test": [{"page": page} for page in PAGES]}),
}


def local(task: str, folder: Path) -> str:
    """Write a task's records for both, and a task of the harness that reads them; return its name."""
    from lm_eval import tasks

    file, splits = CASES[task]
    lines = [f"include: {Path(tasks.__file__).parent / file}", f"task: {task}_local", "dataset_path: json"]
    lines += ["tag: null", "dataset_name: null", "dataset_kwargs:", "  data_files:"]
    for (split, records), name in zip(splits.items(), TASKS[task].files, strict=True):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if task == "wikitext":
            path.write_text("\n".join(record["page"] for record in records))
            path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        lines.append(f"    {split}: {path}")
    lines += [f"{split}_split: null" for split in ("training", "validation") if split[:5] not in str(splits)]
    (folder / f"{task}_local.yaml").write_text("\n".join(lines))
    return f"{task}_local"


@pytest.mark.parametrize("task", CASES)
def test_scores_of_every_item_are_those_of_the_harness(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    import loopq.runtime.lm_eval

    torch.set_num_threads(1)
    for library in ("HUB", "DATASETS"):
        monkeypatch.setenv(f"HF_{library}_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    name, model = local(task, tmp_path), loopq.runtime.lm_eval.LoopqLM("huginn_small", n_steps=2)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    scores = score(model.loaded, task, read_items(task, tmp_path), Execution(), n_steps=2)
    for metric in scores.metrics:
        key, _, kind = metric.name.partition(",")
        samples = [s for s in results["samples"][name] if s["filter"] == (kind or "none")]
        theirs = [s[key] for s in sorted(samples, key=lambda s: s["doc_id"])]
        if key == "word_perplexity":
            assert metric.sizes is not None
            assert [n for _, n in theirs] == metric.sizes.tolist()
            theirs = [value for value, _ in theirs]
        sign = -1.0 if metric.sizes is not None else 1.0
        assert [sign * v for v in theirs] == pytest.approx(metric.values.tolist(), rel=1e-9)
        assert results["results"][name][f"{key},{kind or 'none'}"] == pytest.approx(metric.value)
