"""Load checkpoints in the layout of transformers, from a folder or a downloaded hub id."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq.errors import CheckpointError, ConfigError, LoopqError, model_code, require
from loopq.formats import hf_folder
from loopq.formats.hf_folder import check_weight_files
from loopq.layers.loop_spec import LOOP
from loopq.models.blank import blank, building, drawn
from loopq.models.buffers import repair_buffers
from loopq.models.classes import Findings
from loopq.models.files import account, find_names
from loopq.models.precision import hold
from loopq.models.stream import Stream, unfuse
from loopq.settings.execution import available_bytes
from loopq.storage.files import RawTensor, check_size
from loopq.storage.model_files import types_of
from loopq.storage.schema import shown
from loopq.systems.base import LoopedSystem
from loopq.terminal.text import visible

if TYPE_CHECKING:
    import torch
    from torch import nn

# The version that runs the most published remote code unchanged.
TESTED_TRANSFORMERS = "4.57.6"
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "spiece.model",
)
#: Refuses codes where weights in full precision are needed.
HOLDS_CODES = (
    "holds codes, not weights in full precision: name the model that it was made from; `loopq run`, `loopq export` and "
    "loopq.load take codes, and `loopq evaluate` takes them behind the model"
)
#: Names the licence of a model.
_CARD = ("README.md",)


def fetch(hub_id: str, revision: str | None, allow_pickle: bool) -> Path:
    """Download a checkpoint from the hub, or use the local cache."""
    patterns = [
        *hf_folder.SIDE_FILES,
        *_CARD,
        *hf_folder.WEIGHTS,
        *(hf_folder.PICKLES if allow_pickle else ()),
    ]
    try:
        folder = require("huggingface_hub").snapshot_download(
            hub_id, revision=revision, allow_patterns=patterns
        )
    except Exception as cause:
        raise ConfigError(
            f"{hub_id!r} is no folder, no embedded model, and cannot be fetched from the hub: {cause}"
        ) from cause
    return Path(folder)


def auto_class(config: Mapping[str, Any], trust_remote_code: bool) -> str:
    """Name of the Auto class of transformers that fits a ``config.json``."""
    mapped = config.get("auto_map") or {}
    kinds = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
    if trust_remote_code:
        for kind in kinds:
            if kind in mapped:
                return kind
    names = config.get("architectures") or []
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return kinds[0]
    if any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in names):
        return kinds[1]
    if any(name.endswith("ForConditionalGeneration") for name in names) and "vision_config" in config:
        return "AutoModelForImageTextToText"
    if names:
        return kinds[2]
    causal = require("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return kinds[0] if config.get("model_type") in causal else kinds[2]


def check_remote_code(config: Mapping[str, Any], source: str, trust_remote_code: bool) -> None:
    """Reject a checkpoint with its own code, unless that code is trusted.

    Raises
    ------
    ConfigError
        If the code is not trusted. The message names the code.
    """
    known = is_known(config)
    if config.get("auto_map") and not known and not trust_remote_code:
        files = sorted(
            {visible(str(v).split(".")[0] + ".py", one_line=True) for v in config["auto_map"].values()}
        )
        raise ConfigError(
            f"{source}: model_type {config.get('model_type')!r} is not in transformers; it comes with code of its "
            f"own ({', '.join(files)}). Read it, then allow it with --trust-remote-code (trust_remote_code=True)"
        )
    if not known and not config.get("auto_map"):
        raise ConfigError(
            f"{source}: model_type {config.get('model_type')!r} is not known to transformers; register a class of "
            "your own with loopq.models.classes.register_model (`loopq --register FILE` runs a file first)"
        )


@dataclass(frozen=True)
class Loading:
    """How a checkpoint is loaded, as of `loopq.models.load.load_model`. A `dtype` of None is the checkpoint's."""

    trust_remote_code: bool
    allow_pickle: bool
    dtype: torch.dtype | None
    memory: int | None = None


def load_hf(folder: Path, config: Mapping[str, Any], source: str, how: Loading) -> tuple[nn.Module, Findings]:
    """Load a model of a folder without network access, in eval mode on the CPU. Messages name `source`.

    Returns
    -------
    model : nn.Module
    found : Findings
    """
    if quantized_by(config) == hf_folder.METHOD:
        raise CheckpointError(f"{source}: {HOLDS_CODES}")
    check_weight_files(folder, how.allow_pickle)
    # Refused here, before transformers reads each as a whole.
    side_files(folder)
    check_remote_code(config, source, how.trust_remote_code)
    stored = hf_folder.read_all_tensors(folder) if any(folder.glob("*.safetensors")) else {}
    if not _fits(folder, config, how):
        if quantized_by(config) is not None:
            raise CheckpointError(
                f"{source}: holds codes ({quantized_by(config)}), which are decoded as a whole, and they do not fit in "
                "the memory; give more (--memory), or convert the model to bfloat16"
            )
        note = "weights do not fit in memory: a layer's are read for each of its visits"
        model, unread = _streamed(folder, config, how, stored)
        return model, account(model, stored, unread, source).noted(note)
    model, info = _pretrained(folder, config, source, how)
    if getattr(model, "is_quantized", False):
        raise CheckpointError(
            f"{source}: transformers keeps the codes of {quantized_by(config)} instead of weights; convert the model "
            "to bfloat16"
        )
    found = Findings(
        _names(info, "missing_keys"),
        repaired=repair_buffers(model),
        notes=(f"class {type(model).__module__}.{type(model).__name__}", *unfuse(model)),
    )
    find_names(model, stored)
    hold(model, types_of(stored))
    read = account(model, stored, _names(info, "unexpected_keys"), source)
    return model, dataclasses.replace(found, unexpected=read.unexpected, notes=(*found.notes, *read.notes))


def _pretrained(folder: Path, config: Mapping[str, Any], source: str, how: Loading) -> tuple[nn.Module, Any]:
    """The model as transformers loads it, and what that reports."""
    transformers = require("transformers")
    auto = getattr(transformers, auto_class(config, how.trust_remote_code))
    try:
        # Parameters that a checkpoint lacks and no rollout uses are random. A fixed seed keeps the bytes equal.
        with building(), _quiet(), drawn(seed=0):
            model, info = auto.from_pretrained(
                str(folder),
                trust_remote_code=how.trust_remote_code,
                use_safetensors=None if how.allow_pickle else True,
                local_files_only=True,
                # Its own error names no tensor.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                dtype=how.dtype if how.dtype is not None else "auto",
                **_settings(config),
                **_decoding(config),
            )
    except Exception as cause:  # damaged folders raise various errors
        reason = " ".join(str(cause).split())
        raise CheckpointError(
            f"{source}: transformers {transformers.__version__} cannot load it ({type(cause).__name__}: {reason:.500})"
            f"{_version_advice(config, how.trust_remote_code)}"
        ) from cause
    for name, given, wanted in sorted(_entries(info, "mismatched_keys")):
        raise CheckpointError(
            f"{source}: {name} has shape {[*given]}, with config.json it is {[*wanted]}; config.json is not that of "
            "these weights"
        )
    return model.eval(), info


def from_config(
    folder: Path,
    config: Mapping[str, Any],
    trust_remote_code: bool,
    *,
    dtype: torch.dtype | None = None,
    whole: bool = True,
) -> nn.Module:
    """Build a model with arbitrary weights from its configuration files, by default of the type that they name.

    A `whole` model has memory for its parameters, and separate modules instead of stacked experts.
    """
    transformers = require("transformers")
    auto = getattr(transformers, auto_class(config, trust_remote_code))
    given = {} if dtype is None else {"dtype": dtype}

    def build() -> nn.Module:
        settings = _settings(config).get("config") or transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        built: nn.Module = auto.from_config(settings, trust_remote_code=trust_remote_code, **given)
        return built

    with building():
        model = blank(build, memory=whole)
        model.tie_weights()
    if whole:
        unfuse(model)
    return model


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration for transformers where it would read the file otherwise.

    The file may name a type of loopq's, and version 4 does not read the rotary settings of version 5.
    """
    transformers = require("transformers")
    given = hf_folder.with_rotary(config) if transformers.__version__.startswith("4.") else dict(config)
    if (LOOP not in config and given == config) or not is_known(config):
        return {}
    return {"config": transformers.CONFIG_MAPPING[config["model_type"]].from_dict(given)}


def quantized_by(config: Mapping[str, Any]) -> str | None:
    """Return the method of the codes that a ``config.json`` describes."""
    for part in (config, config.get("text_config")):
        stated = part.get(hf_folder.KEY) if isinstance(part, Mapping) else None
        if isinstance(stated, Mapping):
            return str(stated.get("quant_method"))
    return None


def _decoding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for weights instead of codes. Beside a GPU transformers would keep the codes of FP8."""
    kinds = require("transformers.quantizers.auto").AUTO_QUANTIZATION_CONFIG_MAPPING
    kind = kinds.get(quantized_by(config))
    if kind is None or "dequantize" not in inspect.signature(kind).parameters or hf_folder.KEY not in config:
        return {}
    return {hf_folder.KEY: kind.from_dict({**config[hf_folder.KEY], "dequantize": True})}


def _streamed(
    folder: Path, config: Mapping[str, Any], how: Loading, stored: Mapping[str, RawTensor]
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build a model that reads each layer from its files when it runs. Also return tensors without a place in it."""
    model = from_config(folder, config, how.trust_remote_code, dtype=how.dtype, whole=False)
    return model, Stream(model.eval(), stored).unread


def _fits(folder: Path, config: Mapping[str, Any], how: Loading) -> bool:
    """Whether a model's weights fit in memory. True where this is unknown."""
    limit = how.memory if how.memory is not None else available_bytes()
    if limit is None or not any(folder.glob("*.safetensors")):
        return True
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    wider = how.dtype is not None and how.dtype.itemsize == 4
    wider = wider and str(config.get("dtype")) in ("bfloat16", "float16")
    return stored * (1 + wider) <= limit


def _version_advice(config: Mapping[str, Any], trust_remote_code: bool) -> str:
    if not (trust_remote_code and config.get("auto_map")):
        return ""
    written = config.get("transformers_version")
    stated = (
        f" for transformers {visible(written, one_line=True)}" if written else " for an older transformers"
    )
    return (
        f". Its own code was written{stated}; most published looped models run on {TESTED_TRANSFORMERS}: "
        f"pip install 'transformers=={TESTED_TRANSFORMERS}' (see docs/check-your-checkpoint.md)"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' report and progress bar. Ours reports the same, and also as data."""
    logging = require("transformers").utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def check_missing(source: str, missing: Sequence[str], system: LoopedSystem) -> None:
    """Reject a model if its checkpoint lacks parameters that a rollout uses.

    Raises
    ------
    CheckpointError
        If parameters are missing. The message names them, because they hold random numbers.
    """
    needed = [name for name in missing if not name.startswith(system.published.idle)]
    if needed:
        more = f" and {len(needed) - 5} more" if len(needed) > 5 else ""
        raise CheckpointError(
            f"{source}: the checkpoint lacks {', '.join(needed[:5])}{more}; they would hold random numbers. It is "
            "of another class than its config.json says"
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder contains tokenizer files."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether transformers has a class for a ``config.json``."""
    return (
        config.get("model_type")
        in require("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    )


@dataclass(frozen=True)
class NoText:
    """Placeholder for a missing tokenizer. It refuses text, and says why there is none and what to do."""

    reason: str = "no tokenizer beside the model"
    advice: str = "give prompts as token ids (.npy, or .jsonl with input_ids)"

    def __call__(self, text: str) -> Sequence[int]:
        raise ConfigError(f"{self.reason}; {self.advice}")


def load_tokenizer(
    folder: Path, config: Mapping[str, Any], trust_remote_code: bool
) -> tuple[Any, Callable[[str], Sequence[int]]]:
    """Return the tokenizer beside a ``config.json`` (None without one) and the function that encodes text."""
    if not has_tokenizer(folder):
        return None, NoText()
    transformers = require("transformers")
    # For a model_type it does not know, transformers prints a long warning before it uses the tokenizer's files.
    plain = _settings(config)
    if not is_known(config) and "auto_map" not in config:
        plain = {"config": transformers.PretrainedConfig()}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True, **plain
        )
    # Files and code of the checkpoint, which raise anything.
    except Exception as cause:
        first = next(iter(str(cause).strip().splitlines()), "")
        hint = "" if trust_remote_code else "; allow code of its own with --trust-remote-code if you trust it"
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be loaded ({type(cause).__name__}: {shown(first)}){hint}"
        ) from cause

    return tokenizer, encoder(tokenizer, f"{folder}")


def encoder(tokenizer: Any, where: str) -> Callable[[str], Sequence[int]]:
    """Return the function from text to token ids of a tokenizer of transformers. It adds no special tokens."""

    # A text is cut after it is encoded. Without `verbose=False` the tokenizer warns that it exceeds the model's length.
    def encode(text: str) -> list[int]:
        with model_code(where, CheckpointError, "the tokenizer"):
            return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    return encode


def cached_tokenizer(name: str, revision: str | None) -> Path | None:
    """Return the folder of tokenizer files by a folder's name, or by a hub id in the local cache. None without them."""
    if not name:
        return None
    folder = Path(name)
    if not folder.is_dir() and HUB_ID.match(name):
        with contextlib.suppress(OSError, ValueError, LoopqError):  # not in the cache, or no huggingface_hub
            hub = require("huggingface_hub")
            folder = Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    return folder if has_tokenizer(folder) else None


def side_files(folder: Path) -> tuple[Path, ...]:
    """Files of a checkpoint other than weights and their index. A special or a huge one is refused."""
    paths = {path for pattern in hf_folder.SIDE_FILES for path in folder.glob(pattern)}
    files = tuple(sorted(p for p in paths if not p.is_dir() and not p.name.endswith(".index.json")))
    for path in files:
        check_size(path)
    return files


def _entries(info: Any, key: str) -> Sequence[Any]:
    entries: Sequence[Any] = info.get(key, ()) if isinstance(info, Mapping) else getattr(info, key, ())
    return entries


def _names(info: Any, key: str) -> tuple[str, ...]:
    return tuple(sorted(map(str, _entries(info, key))))
