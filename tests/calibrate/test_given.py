"""Prompts that Python holds give the tokens of the equivalent file, or are refused in one line."""

from __future__ import annotations

import itertools
import json
from array import array

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import loopq
from loopq.calibrate.given import given_tokens, one_prompt
from loopq.calibrate.prompts import Take, calibration_tokens, evaluation_tokens
from loopq.calibrate.read import Served, read_tokens
from loopq.errors import CalibrationError
from loopq.models.load import load_model
from tests.support.subwords import dense_folder

_TEXTS = ["The sea was calm.", "And the ship went on, as it had for days.", "Nobody spoke.", "No wind."]
_RECORDS = [{"text": text, "n": number} for number, text in enumerate(_TEXTS)]
_DIALOGUES = [
    [{"role": "user", "content": a}, {"role": "assistant", "content": b}]
    for a, b in itertools.pairwise(_TEXTS)
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(dense_folder(tmp_path_factory.mktemp("dense")))


@pytest.fixture(scope="module")
def expected(loaded, tmp_path_factory):
    """Token ids of a file with one record in a line."""

    def read(records, seq_len=12, **settings):
        path = tmp_path_factory.mktemp("file") / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        served = Take(**settings).served(loaded)
        return [s.tolist() for s in read_tokens(path, served, seq_len, None).sequences]

    return read


def _ids(tokens):
    return [s.tolist() for s in tokens.sequences]


def _dataset(rows):
    return pytest.importorskip("datasets").Dataset.from_list(list(rows))


_TEXT_KINDS = {
    "list": lambda texts: texts,
    "tuple": tuple,
    "array": np.array,
    "generator": iter,
    "records": lambda texts: _RECORDS,
    "columns": lambda texts: {"text": texts},
    "dataset": lambda texts: _dataset(_RECORDS),
    "column of a dataset": lambda texts: _dataset(_RECORDS)["text"],
    "iterable dataset": lambda texts: _dataset(_RECORDS).to_iterable_dataset(),
    "loader of texts": lambda texts: DataLoader(texts, batch_size=3),
    "loader of records": lambda texts: DataLoader(_RECORDS, batch_size=3),
}


@pytest.mark.parametrize("kind", _TEXT_KINDS)
def test_texts_give_the_tokens_of_a_file(loaded, expected, kind):
    want = expected(_RECORDS)
    assert want[0][0] == loaded.tokenizer.bos_token_id
    for read in (calibration_tokens, evaluation_tokens):
        tokens = read(loaded, _TEXT_KINDS[kind](_TEXTS), Take(seq_len=12))
        assert _ids(tokens) == want
        assert tokens.packing == "prompts"
    assert len(read(loaded, _TEXT_KINDS[kind](_TEXTS), Take(n_prompts=2)).sequences) == 2


@pytest.fixture(scope="module")
def expected_dialogues(expected):
    return expected([{"messages": dialogue} for dialogue in _DIALOGUES], template=True)


@pytest.mark.parametrize("kind", ["list", "records", "dataset", "single"])
def test_dialogues_take_the_template(loaded, expected_dialogues, kind):
    records, want = [{"messages": dialogue} for dialogue in _DIALOGUES], expected_dialogues
    given = {
        "list": _DIALOGUES, "records": records, "single": _DIALOGUES[0],
        "dataset": _dataset(records) if kind == "dataset" else None,
    }  # fmt: skip
    tokens = calibration_tokens(loaded, given[kind], Take(seq_len=12))
    assert _ids(tokens) == want[: len(tokens.sequences)]
    assert len(tokens.sequences) == (1 if kind == "single" else len(want))
    assert loaded.tokenizer.decode(tokens.sequences[0]).startswith("user: The")


def test_settings_of_records_hold_in_python(loaded, expected):
    rows = [{"question": "Why?", "answer": "So.", "n": 3}]
    for settings in ({}, {"field": "answer"}, {"template": True}):
        want = expected(rows, **settings)
        assert _ids(calibration_tokens(loaded, rows, Take(seq_len=12, **settings))) == want
    assert _ids(calibration_tokens(loaded, _TEXTS, Take(seq_len=12, template=True))) == expected(
        _RECORDS, template=True
    )


def _padded(loaded, side):
    loaded.tokenizer.padding_side = side
    return loaded.tokenizer(_TEXTS, padding=True, return_tensors="pt")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_prompt(loaded, expected, side):
    batch, want = _padded(loaded, side), expected(_RECORDS, seq_len=64)
    assert batch.input_ids.shape[1] > min(map(len, want))
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    kinds = {
        "batch": batch,
        "dict of lists": {k: v.tolist() for k, v in batch.items()},
        "rows": rows,
        "rows of one prompt": [{k: v[None] for k, v in row.items()} for row in rows],
        "loader": DataLoader(rows, batch_size=3),
        "dataset": _dataset([{k: v.tolist() for k, v in row.items()} for row in rows]),
        "lists of several lengths": loaded.tokenizer(_TEXTS),
    }
    for kind, given in kinds.items():
        assert _ids(calibration_tokens(loaded, given, Take(seq_len=64))) == want, kind
    assert one_prompt({k: v[:1] for k, v in batch.items()}, Served(list)) == (want[0], False)


def test_codes_are_those_of_prompts_without_padding(loaded):
    settings = {"group_size": 16, "threads": 1, "preset": "fast"}
    plain = loopq.quantize(loaded, [loaded.tokenizer(text).input_ids for text in _TEXTS], **settings)
    padded = loopq.quantize(loaded, _padded(loaded, "left"), **settings)
    masked = loopq.quantize(loaded, _padded(loaded, "left").input_ids, **settings)
    assert padded.digest() == plain.digest() != masked.digest()
    assert padded.settings["calibration"] == plain.settings["calibration"]


_ROWS = [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1], [2, 4, 6, 1, 3, 5]]


@pytest.mark.parametrize("given", [
    _ROWS, tuple(_ROWS), np.array(_ROWS, np.uint16), torch.tensor(_ROWS), list(torch.tensor(_ROWS)),
    [torch.tensor(_ROWS[:2]), torch.tensor(_ROWS[2:])], DataLoader(TensorDataset(torch.tensor(_ROWS)), batch_size=2),
    (row for row in _ROWS), [array("i", row) for row in _ROWS],
])  # fmt: skip
def test_ids_are_truncated_as_those_of_a_file(tmp_path, given):
    np.save(tmp_path / "a.npy", np.array(_ROWS))
    want = _ids(read_tokens(tmp_path / "a.npy", Served(list), 4, None))
    tokens = given_tokens(given, Served(list), 4, None, 3)
    assert _ids(tokens) == want == [row[:4] for row in _ROWS]
    assert "3 of 3 prompts truncated to 4 tokens" in tokens.source


def test_all_ids_are_taken_and_texts_up_to_the_default(loaded):
    served = Take().served(loaded)
    assert len(given_tokens(_ROWS, served, 8, None, 2).sequences) == 3
    assert len(given_tokens({"input_ids": _ROWS}, served, 8, None, 2).sequences) == 3
    assert len(given_tokens(_TEXTS, served, 8, None, 2).sequences) == 2
    assert len(given_tokens(iter(lambda: "endless", None), served, 8, None, 5).sequences) == 5
    for ids in (range(7), array("i", range(7)), [range(4), range(3, 7)]):
        assert _ids(given_tokens(ids, served, 3, None, 5))[0] == [0, 1, 2]


@pytest.mark.parametrize(("given", "said"), [
    (torch.rand(3, 8), r"token ids are whole numbers .* got float32 \(3, 8\)"),
    (torch.rand(3, 8).bfloat16(), "got torch.bfloat16"),
    (torch.rand(3, 8, 4), "got float32"),
    (torch.ones(3, 8, dtype=torch.bool), "got bool"),
    (torch.ones(3, 8, dtype=torch.complex64), "got complex64"),
    (torch.zeros(3, 8, requires_grad=True), "got float32"),
    (np.array([1.0, 2.0]), "got float64"),
    ([84.9, 104.2], "got float64"),
    ([[1, 2], [1.5, 2]], "item 1: .*got float64"),
    ([True, 1, 0], "got booleans"),
    ([[1, 2], [True, 1]], "item 1: .*booleans"),
    ([1, 2, 1 << 70], "got object"),
    ([[[1, 2], [3]], "text", 5], "item 2: got int 5"),
    ([object()], "item 0: got object"),
    (7, "got int 7"),
    (b"abc", "got bytes"),
    ([None], "item 0: got NoneType"),
    ([], "no token sequences"),
    ([[1], []], "prompt 1 is empty"),
    ([{"n": 3}], "item 0: no 'input_ids', 'messages' or text; its keys: 'n'"),
    ({"train": [1], "test": [2]}, "'train', 'test'; of a set of splits"),
    ((torch.tensor(_ROWS), torch.ones(3, 6, dtype=torch.int64)), "a batch of 2 arrays"),
    (DataLoader(TensorDataset(torch.tensor(_ROWS), torch.tensor(_ROWS))), "item 0: a batch of 2 arrays"),
    ({"input_ids": _ROWS, "attention_mask": [1, 1, 1]}, "must have one entry for each prompt"),
    ({"input_ids": _ROWS, "attention_mask": [[1] * 6]}, "must have one entry for each prompt"),
    ({"input_ids": torch.rand(2, 3)}, "token ids are whole numbers"),
    ([{"messages": "x"}, {"messages": [{"role": "user", "content": "x"}]}], "no chat template"),
])  # fmt: skip
def test_what_is_no_prompt_is_refused_in_one_line(given, said):
    with pytest.raises(CalibrationError, match=rf"^[^\n]*{said}[^\n]*$"):
        given_tokens(given, Served(lambda text: [1]), 8, None, 128)


def test_a_table_of_pandas_is_refused():
    class Frame:
        columns = ("text",)

        def to_dict(self, orient):
            raise NotImplementedError

        def __iter__(self):
            return iter(self.columns)

    with pytest.raises(CalibrationError, match=r"got a Frame; give frame\.to_dict\('records'\)"):
        given_tokens(Frame(), Served(list), 8, None, 128)


def test_one_prompt_is_continued(loaded):
    served = Take().served(loaded)
    ids = loaded.tokenizer(_TEXTS[0]).input_ids
    for given in (ids, np.array(ids), torch.tensor([ids]), loaded.tokenizer(_TEXTS[0]), [{"input_ids": ids}]):
        assert one_prompt(given, served) == (ids, False)
    assert one_prompt([_TEXTS[0]], served) == (ids, True)
    template = loaded.tokenizer.apply_chat_template(_DIALOGUES[0], tokenize=True, return_dict=False)
    assert one_prompt(_DIALOGUES[0], served) == (template, True)
    with pytest.raises(CalibrationError, match="several prompts"):
        one_prompt(_ROWS, served)
    text = loopq.generate(loaded, _TEXTS[0], n_tokens=3)
    assert loopq.generate(loaded, [_TEXTS[0]], n_tokens=3) == text
    assert isinstance(loopq.generate(loaded, _DIALOGUES[0][:1], n_tokens=2), str)
    assert isinstance(loopq.generate(loaded, torch.tensor([ids]), n_tokens=2), list)
