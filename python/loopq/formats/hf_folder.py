"""Folders in transformers' layout: config.json, safetensors in one file or in shards, and other files."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from loopq.errors import CheckpointError, ConfigError
from loopq.layers.loop_spec import BASE, LOOP, with_loop
from loopq.storage.files import MAX_SIZE, RawTensor, check_regular, inside, map_tensors, read_bytes, read_json
from loopq.storage.model_files import TENSORS
from loopq.storage.schema import TEMPLATES, Name, Object, checked, parse_json, shown

CONFIG = "config.json"
QUANTIZE_CONFIG, HF_QUANT_CONFIG = "quantize_config.json", "hf_quant_config.json"
SHARDS = "model.safetensors.index.json"
KEY = "quantization_config"
CARD, PICTURE = "README.md", "card.png"
#: Patterns of what belongs to a model beside its weights, of its weights, and of weights that can run code.
SIDE_FILES = (
    *("*.json", "*.txt", "*.model", "*.py", "*.jinja", f"{TEMPLATES}/*.jinja"),
    *("LICENSE*", "COPYING*", "NOTICE*", "USE_POLICY*"),
)
WEIGHTS = ("*.safetensors",)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: `quant_method` of loopq's own tensors, which `loopq.runtime.transformers` registers.
METHOD = "loopq"
#: Module and classes that run a loop in transformers without loopq.
_CODE = "modeling_looped"
LOOP_CODE = f"{_CODE}.py"
#: Names of transformers 4 for the base of the positions and the rotated part of a head, where a class has its own.
_ROTARY = ("rope_theta", "partial_rotary_factor")
_OWN_ROTARY = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "rotary_pct"))
#: Types of models with settings for two kinds of layers in transformers 5. Version 4 scales full attention alone.
_BY_KIND = ("gemma3_text", "gemma3n_text", "olmo3")
_CLASSES = {"AutoConfig": "LoopedConfig", "AutoModelForCausalLM": "LoopedForCausalLM"}


@dataclass(frozen=True)
class _Shards:
    weight_map: dict[str, Name]


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file. None if the folder has no index of shards."""
    if not (folder / SHARDS).exists():
        return None
    return checked(_Shards, read_json(inside(folder, SHARDS)), folder / SHARDS, others=True).weight_map


def _weight_files(folder: Path) -> list[str]:
    """The single safetensors file of a folder without an index."""
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {pickled[0]} is a pickle, which can run code: convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{folder}: no safetensors file{hint}")
    if TENSORS not in names and len(names) > 1:
        raise CheckpointError(f"{folder}: {len(names)} safetensors files and no {SHARDS}")
    return [TENSORS if TENSORS in names else names[0]]


def read_all_tensors(folder: Path) -> dict[str, RawTensor]:
    """Map every tensor of the shards in the index, or of the single safetensors file (`map_tensors`).

    Raises
    ------
    CheckpointError
        If there is no file, or several without an index. Also if a tensor is in two shards, or in another than the
        index names. Pickled weights are not read.
    """
    tensors: dict[str, RawTensor] = {}
    places: dict[str, str] = {}
    stated = _weight_map(folder)
    for file in _weight_files(folder) if stated is None else sorted(set(stated.values())):
        for name, tensor in map_tensors(inside(folder, file)).items():
            if name in tensors:
                raise CheckpointError(f"{folder / file}: tensor {shown(name)} is in another shard too")
            tensors[name], places[name] = tensor, file
    stated = places if stated is None else stated
    for name in sorted({*stated, *places}):
        if stated.get(name) != places.get(name):
            says, place = stated.get(name, "nothing"), places.get(name, "no shard")
            raise CheckpointError(f"{folder}: tensor {shown(name)}: {SHARDS} says {says}, it is in {place}")
    return tensors


def read_config(folder: Path) -> tuple[Object, Object | None]:
    """Return config.json without its quantization config, and that config (None if absent).

    Without one in config.json, the file of GPTQ or of ModelOpt is read."""

    def read(name: str) -> Object:
        data = read_json(inside(folder, name), finite=False)
        return checked(Object, data, folder / name)

    config = read(CONFIG)
    entry = config.pop(KEY, None)
    if entry is None and (folder / QUANTIZE_CONFIG).exists():
        entry = {"quant_method": "gptq", **read(QUANTIZE_CONFIG)}
    if entry is None and (folder / HF_QUANT_CONFIG).exists():
        stated = checked(Object, read(HF_QUANT_CONFIG).get("quantization"), folder / HF_QUANT_CONFIG)
        entry = {"quant_method": "modelopt", **stated}
    return config, None if entry is None else checked(Object, entry, f"{folder / CONFIG}: {KEY}")


def side_files(folder: Path, leave_out: frozenset[str], patterns: Sequence[str] = ("*",)) -> dict[str, bytes]:
    """Read the files beside the weights: tokenizer, remote code, generation config."""
    weights = {SHARDS, CONFIG, QUANTIZE_CONFIG, HF_QUANT_CONFIG, *leave_out}
    paths = [p for p in sorted([*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")]) if p.is_file()]
    names = [p.relative_to(folder).as_posix() for p in paths if not p.name.startswith(".")]
    kept = [n for n in names if n not in weights and not n.endswith((".safetensors", ".bin"))]
    kept = [n for n in kept if any(fnmatch.fnmatch(n, pattern) for pattern in patterns)]
    return {name: read_bytes(inside(folder, name), MAX_SIZE) for name in kept}


def unquantized(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the side files of a model without what they say of its codes, for a model that holds plain numbers."""
    kept = {name: data for name, data in files.items() if name not in (QUANTIZE_CONFIG, HF_QUANT_CONFIG)}
    if f'"{KEY}"'.encode() in kept.get(CONFIG, b""):
        config = checked(Object, parse_json(kept[CONFIG], CONFIG, finite=False), CONFIG)
        parts = {name: part for name, part in config.items() if isinstance(part, dict)}
        plain = {name: {k: v for k, v in part.items() if k != KEY} for name, part in parts.items()}
        rest = {name: value for name, value in (config | plain).items() if name != KEY}
        kept[CONFIG] = (json.dumps(rest, indent=2, ensure_ascii=False) + "\n").encode()
    return kept


def for_all_versions(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the side files of a model with a config.json that both versions of transformers read alike."""
    data = files.get(CONFIG, b"")
    if b'"rope_parameters"' not in data:
        return dict(files)
    config = checked(Object, parse_json(data, CONFIG, finite=False), CONFIG)
    both = with_rotary(config)
    if both == config:
        return dict(files)
    return {**files, CONFIG: (json.dumps(both, indent=2, ensure_ascii=False) + "\n").encode()}


def with_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the rotary settings in the form of transformers 4 beside that of transformers 5.

    Version 5 writes `rope_parameters`. Version 4 does not read it, and takes the defaults of the class without a word.
    A file with the older `rope_scaling` stays as it is, since version 5 prefers that.
    """
    found = dict(config)
    if isinstance(config.get("text_config"), Mapping):
        found["text_config"] = with_rotary(config["text_config"])
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping) or config.get("rope_scaling"):
        return found
    kind = str(config.get(BASE) or config.get("model_type"))
    if not any(isinstance(part, Mapping) for part in given.values()):
        return found | _rotary_of_4(given, kind)
    full, local = given.get("full_attention"), given.get("sliding_attention")
    if kind not in _BY_KIND or not isinstance(full, Mapping) or not isinstance(local, Mapping):
        return found
    local_base = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
    return found | _rotary_of_4(full, kind) | local_base


def _rotary_of_4(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Settings for one kind of layer as transformers 4 has them."""
    names = dict(zip(_ROTARY, _OWN_ROTARY.get(kind, _ROTARY), strict=True))
    plain = {names[name]: given[name] for name in _ROTARY if given.get(name) is not None}
    scaling = {name: value for name, value in given.items() if name not in (*_ROTARY, "type")}
    method = given.get("rope_type", given.get("type", "default"))
    if method == "default":
        return plain
    if method == "longrope":
        # Phi-3 wants these three keys alone.
        scaling["type"] = scaling.pop("rope_type", method)
        length = scaling.pop("original_max_position_embeddings", None)
        plain |= {} if length is None else {"original_max_position_embeddings": length}
    return {**plain, "rope_scaling": scaling}


def looped_files(files: Mapping[str, bytes], remote_code: bool) -> dict[str, bytes]:
    """Return the side files of a model. A config.json with a loop gets the loop's own type, if an older loopq wrote it.

    Parameters
    ----------
    files : mapping of str to bytes
        File name to contents.
    remote_code : bool
        Add the code that runs the loop in transformers without loopq, and name it in config.json.

    Raises
    ------
    ConfigError
        Code is asked for, and the model has no loop.
    """
    config: dict[str, Any] = {}
    if CONFIG in files:
        config = checked(Object, parse_json(files[CONFIG], CONFIG, finite=False), CONFIG)
    if LOOP not in config:
        if remote_code:
            raise ConfigError(
                "remote_code (--remote-code) writes the loop of a looped: model, and this model is none; leave it out"
            )
        return dict(files)
    looped, code = with_loop(config, config[LOOP]), {}
    if remote_code:
        looped["auto_map"] = {n: f"{_CODE}.{class_name}" for n, class_name in _CLASSES.items()}
        source = resources.files("loopq.runtime").joinpath(LOOP_CODE)
        code = {LOOP_CODE: source.read_bytes()}
    if looped == config and code.items() <= files.items():
        return dict(files)
    return {**files, CONFIG: (json.dumps(looped, indent=2, ensure_ascii=False) + "\n").encode(), **code}


def check_weight_files(folder: Path, allow_pickle: bool) -> None:
    """Reject a folder without weights, with forbidden pickled weights, or with files that are not plain.

    Raises
    ------
    CheckpointError
        In any of these cases. The message gives the remedy.
    """
    for pattern in (*SIDE_FILES, *WEIGHTS, *PICKLES):
        for path in folder.glob(pattern):
            if not path.is_dir():
                check_regular(path)
    # transformers opens each file that an index names, whatever its name.
    for index in folder.glob("*.index.json"):
        stated = checked(_Shards, read_json(inside(folder, index.name)), index, others=True)
        for name in sorted(set(stated.weight_map.values())):
            # Shards of a layout that is not loaded may be absent.
            if os.path.lexists(folder / name):
                inside(folder, name)
    for path in folder.glob("*.safetensors"):
        inside(folder, path.name)
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        raise CheckpointError(f"{folder}: no weights in it; put the *.safetensors files beside config.json")
    if not allow_pickle:
        raise CheckpointError(
            f"{folder}: weights only as pickles ({', '.join(pickles)}), which can run code when they are read; "
            "convert them to safetensors, or allow them with --allow-pickle (allow_pickle=True) if you trust the source"
        )


def matches(pattern: str, module: str, where: str) -> bool:
    """Whether a regular expression of a file matches the beginning of a module's name.

    A search can take exponential time in the name if it repeats a group, and polynomial time for other repeats. Both
    are limited because a file may come from anyone.
    """
    repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
    try:
        if len(pattern) > 2000 or repeats > 4 or re.search(r"(?<!\\)\)[*+{]", pattern):
            raise re.error("more than 4 repeats, a repeated group, or more than 2000 characters")
        return re.match(pattern, module) is not None
    except (re.error, OverflowError, RecursionError) as cause:
        raise CheckpointError(f"{where}: pattern {shown(pattern)}: {cause}") from None
