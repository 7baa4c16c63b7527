"""`loopq check`: which systems there are, and whether loopq fits a model."""

from __future__ import annotations

import json

import torch
from transformers import AlbertConfig, AlbertModel

from loopq.systems import SYSTEMS


def test_check_of_a_model_and_without_one(saved_model, command):
    code, text, _ = command("check")
    assert code == 0
    rows = {line.split()[0]: line.rstrip() for line in text.splitlines() if line.strip()}
    assert all(system.summary and system.summary in rows[name] for name, system in SYSTEMS)
    assert "Huginn-3.5B: 17" in rows["huginn"]
    assert rows["huginn"].endswith("adapter")
    listed = json.loads(command("check", "--json")[1])
    assert [row["system"] for row in listed] == SYSTEMS.names()
    code, text, _ = command("check", saved_model)
    assert code == 0
    assert text.startswith(str(saved_model))
    assert "tokenizer     " in text
    assert "3 calls of each weight, as declared" in text
    assert "FAILS" not in text
    assert text.endswith("loopq fits this model\n")


def test_check_casts_and_prints_json(saved_model, command):
    code, text, err = command("check", saved_model, "--dtype", "bfloat16", "--n-steps", 2, "--json")
    assert code == 0, err
    data = json.loads(text)
    assert data["ok"] is True
    assert (data["system"], data["n_steps"], data["load"]["dtype"]) == ("huginn", 2, "bfloat16")
    assert {v["check"]: v["ok"] for v in data["verdicts"]}["single steps"] is True


def test_check_says_what_does_not_fit(saved_model, command, monkeypatch):
    cls = SYSTEMS.get("huginn")
    plain = cls.shared_parameters
    monkeypatch.setattr(cls, "shared_parameters", lambda self, n: plain(self, n)[1:])
    code, text, _ = command("check", saved_model)
    assert code == 1
    assert "loopq does not fit this model: nothing forgotten" in text
    assert json.loads(command("check", saved_model, "--json")[1])["ok"] is False


def test_a_published_name_says_what_the_model_needs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text, err = command("check", "Ouro-1.4B")
    assert code == 0
    assert "code          comes with the checkpoint; read it, then give --trust-remote-code" in text
    assert "name its folder or its hub id" in err
    assert "dtype" in json.loads(command("check", "Ouro-1.4B", "--json")[1])
    assert command("check", "nothing")[0] == 2


def test_a_device_that_is_not_there_is_said(saved_model, command):
    code, _, err = command("check", saved_model, "--device", "nonsense")
    assert code == 2
    assert "device 'nonsense' cannot be used here" in err
    assert len(err.splitlines()) == 1


def test_pickles_are_read_only_when_allowed(tmp_path, command):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
    model = AlbertModel(AlbertConfig(vocab_size=64, embedding_size=16, **sizes))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    code, _, err = command("check", tmp_path)
    assert code == 1
    assert "allow them with --allow-pickle" in err
    code, text, err = command("check", tmp_path, "--allow-pickle")
    assert code == 0, err
    assert "system albert, 3 steps" in text
