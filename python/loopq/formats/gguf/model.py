"""GGUF, exact: codes and scales as blocks of llama.cpp, bit for bit. Spec: docs/formats/gguf.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError, ConfigError, require
from loopq.formats import FORMATS
from loopq.formats.base import Check, Format, FormatOptions, Option, Planned, WrittenFile
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.fitting import in_scale_type, split
from loopq.formats.gguf.file import contents, holds_gguf, open_gguf, package, told
from loopq.formats.gguf.shape import ARCHITECTURES, Shape
from loopq.formats.gguf.vocabulary import Vocabulary
from loopq.layers.grid import SCALE_DTYPES, BlockType, Grid
from loopq.layers.layer import QuantizedLayer
from loopq.storage.files import RawTensor
from loopq.storage.folders import check_new, output_file
from loopq.terminal.table import render, size

#: Types of tensors that are not quantized.
_DENSE = {t.name: t for t in (BlockType("F16", 1, 160), BlockType("BF16", 32, 161), BlockType("F32", 0, 320))}
#: Key of a file that was written against the table of engines: the reason.
FORCED = "loopq.forced"
#: A tensor of the file: its type, and its bytes or numbers.
_Stored = tuple[BlockType, NDArray[Any]]


def blocks(layer: QuantizedLayer) -> tuple[BlockType, NDArray[np.uint8]]:
    """Return a layer as blocks of GGUF.

    Returns
    -------
    kind : BlockType
        The type.
    data : uint8 array of shape (out, blocks of a row * bytes of a block)

    Raises
    ------
    CheckpointError
        If the grid is different, rows are not whole blocks, or float16 cannot hold the scales.
    """
    columns = layer.shape[1]
    if layer.transform is not None:
        raise CheckpointError(
            f"layer {layer.name}: its codes are for a transformed input, which llama.cpp does not know; quantize "
            "without rotation and without awq, or keep loopq's own format"
        )
    kind = layer.grid.gguf
    if kind is None:
        raise CheckpointError(
            f"layer {layer.name}: {layer.grid.label}: llama.cpp has no type for it; quantize with --levels q4_0 or "
            "another type of docs/formats/gguf.md, or with --bits 4 or 8, symmetric, --levels even"
        )
    width, size = layer.grid.width(columns), layer.grid.gguf_width
    if columns % size or width % size:
        raise CheckpointError(
            f"layer {layer.name}: {columns} columns in groups of {width}: a block of {kind.name} is {size} weights of "
            f"a row and one scale; quantize with groups of a multiple of {size}, or --exclude the layer"
        )
    cut = split(layer.on_grid(group_size=width), size).layer
    if cut.grid.scale_dtype in SCALE_DTYPES:
        cut = in_scale_type(cut, "float16", "GGUF")
    try:
        return kind, cut.grid.gguf_data(cut.codes, cut.scales, cut.zeros)
    except (CheckpointError, ConfigError) as cause:
        raise CheckpointError(f"layer {layer.name}: {cause}") from None


@dataclass(frozen=True)
class GGUFOptions(FormatOptions):
    """`vocabulary` is a GGUF file with the tokenizer, in the place of the model's own. "none" leaves it out."""

    vocabulary: str | Path | None = None


_DEFAULTS = GGUFOptions()


class GGUF(Format):
    """One file of llama.cpp: a Llama-shaped loop, quantized or not."""

    name: ClassVar[str] = "gguf"
    library: ClassVar[str] = "gguf"
    takes: ClassVar[Literal["checkpoint", "model", "dump"]] = "model"
    one_file: ClassVar[bool] = True
    reads: ClassVar[bool] = False
    holds_tables: ClassVar[bool] = True
    outside: ClassVar[str | None] = "q6_k"
    options: ClassVar[tuple[Option, ...]] = (
        Option(
            "vocabulary",
            "copy the tokenizer of this GGUF file in the place of the model's own; none: no tokenizer",
            metavar="FILE",
        ),
    )

    values: ClassVar[type[FormatOptions]] = GGUFOptions

    def holds(self, path: Path) -> bool:
        """Whether it is a GGUF file with a model."""
        return holds_gguf(path, importance=False)

    def can_hold(self, grid: Grid) -> bool:
        """Whether the grid has blocks or a specific message."""
        return grid.portable or grid.gguf is not None

    def refuse(self, planned: Planned, options: GGUFOptions = _DEFAULTS) -> None:
        """Reject an architecture, a tensor or a grid that the file cannot store.

        Whether float16 holds bfloat16 scales depends on their values, so this is only known after the run.
        """
        require("gguf")
        shape = Shape.read(planned.side_files).check_whole()
        super().refuse(planned)
        for layer in planned.layers:
            if layer.grid.scale_dtype == "float32":
                raise CheckpointError(
                    f"layer {layer.name}: GGUF stores scales in float16, and float32 scales do not fit; quantize with "
                    "--set scale_dtype=float16"
                )
            blocks(layer)
            shape.tensors(layer.name)
        for name, dtype in planned.dense.items():
            _check_type(name, dtype)
            for part in shape.parts(name):
                shape.tensors(part)
        _check_head(shape, planned.ties)
        Vocabulary.of(planned.side_files, shape.config, options.vocabulary)

    def write(
        self,
        out: Path,
        source: Checkpoint,
        options: GGUFOptions = _DEFAULTS,
        *,
        also: Check | None = None,
    ) -> WrittenFile:
        """Write the file, read it back with the package `gguf` and compare every tensor, dequantized.

        Parameters
        ----------
        out : Path
            New file.
        source : Checkpoint
            Checkpoint. Without a quantized layer its tensors are written unchanged.
        options : GGUFOptions
            The file has `forced` under `FORCED`.
        also : callable, optional
            Not called because loopq does not read the file.

        Raises
        ------
        CheckpointError
            If llama.cpp does not support the architecture, grid or tokenizer. The message names a remedy.
        """
        check_new(out)
        shape = Shape.read(source.side_files).check_whole()
        _check_head(shape, source.ties)
        _check_stored_head(shape, source)
        words = Vocabulary.of(source.side_files, shape.config, options.vocabulary)
        stored = dict(_stored(source, shape))
        shape.check_tensors(stored)
        with output_file(out, sum(data.nbytes for _, data in stored.values())) as temporary:
            with told(out):
                _write(temporary, shape, stored, words.entries, options.forced)
            n_compared = _compare(temporary, source, shape)
        n_bytes = out.stat().st_size
        lines = [f"{out}: GGUF, {shape.name}, {shape.n_loops} loops, {n_compared} tensors, {n_bytes} bytes"]
        if len(shape.order) > len(set(shape.order)):
            lines.append(f"the loop is written out: {len(shape.order)} layers in the order in which they run")
        lines += [*shape.notes, *words.notes, *_floats(source, stored), *_left_out(source, shape)]
        lines.append(f"read back from disk by gguf: {n_compared} tensors equal, number by number")
        return WrittenFile(out, self.name, tuple(lines))

    def verify(self, path: Path, checkpoint: Checkpoint) -> None:
        """Compare every tensor of the file, dequantized, with the checkpoint's."""
        _compare(path, checkpoint, Shape.read(checkpoint.side_files))

    def facts(self, path: Path) -> dict[str, Any]:
        """Describe the file: architecture, loops, layers and tokenizer, and each tensor with its type.

        `n_loops` is None if the file does not give it as one number.
        """
        reader = open_gguf(path)
        architecture = contents(path, reader, "general.architecture")
        loops = next((kind.loops_key for name, kind in ARCHITECTURES if name == architecture), "")
        with told(path):
            tensors = [
                {
                    "name": t.name, "type": t.tensor_type.name, "shape": [int(n) for n in reversed(t.shape)],
                    "n_bytes": int(t.n_bytes),
                } for t in reader.tensors
            ]  # fmt: skip
        return {
            "format": self.name,
            "architecture": architecture,
            "n_loops": contents(path, reader, f"{architecture}.{loops}" if loops else ""),
            "n_layers": contents(path, reader, f"{architecture}.block_count"),
            "tokenizer": contents(path, reader, "tokenizer.ggml.model"),
            "forced": contents(path, reader, FORCED),
            "n_bytes": path.stat().st_size,
            "tensors": tensors,
        }

    def describe(self, facts: Mapping[str, Any]) -> list[str]:
        """A table of the tensors by type, and a description of the model."""
        counts, weights, n_bytes = Counter[str](), Counter[str](), Counter[str]()
        for tensor in facts["tensors"]:
            kind = tensor["type"]
            counts[kind] += 1
            weights[kind] += int(np.prod(tensor["shape"], dtype=object))
            n_bytes[kind] += tensor["n_bytes"]
        rows = [(kind, counts[kind], weights[kind], size(n_bytes[kind])) for kind in sorted(counts)]
        loops = "loops not stated" if facts["n_loops"] is None else f"{facts['n_loops']} loops"
        return [
            *render(("type", "tensors", "weights", "bytes"), rows).splitlines(),
            f"format {self.name}, architecture {facts['architecture']}, {facts['n_layers']} layers, {loops}; "
            f"tokenizer {facts['tokenizer'] or 'none'}; {size(facts['n_bytes'])} on disk",
            *([f"forced: {facts['forced']}"] if facts["forced"] else []),
        ]


def _stored(checkpoint: Checkpoint, shape: Shape) -> Iterator[tuple[str, _Stored]]:
    """Tensors by llama.cpp's names, with rows in its order."""
    for name, layer in checkpoint.layers.items():
        kind, data = blocks(layer)
        yield from ((target, (kind, data[shape.rows(name, len(data))])) for target in shape.tensors(name))
    for name, tensor in shape.apart(checkpoint.dense).items():
        stored = _dense(name, tensor, shape.rows(name, tensor.shape[0]))
        yield from ((target, stored) for target in shape.tensors(name))


def _floats(source: Checkpoint, stored: Mapping[str, _Stored]) -> list[str]:
    """Tell the bytes of embedding and head that llama.cpp's own quantizer would have rounded."""
    heads = [name for name in ("token_embd.weight", "output.weight") if name in stored]
    wide = [name for name in heads if stored[name][0].name in _DENSE]
    if not source.layers or not wide:
        return []
    n_bytes = sum(stored[name][1].nbytes for name in wide)
    return [
        f"note: {' and '.join(wide)} not quantized: {size(n_bytes)}; quantize with --outside q6_k, as llama.cpp does"
    ]


def _check_head(shape: Shape, ties: Mapping[str, str]) -> None:
    if shape.config.get("tie_word_embeddings") is False and "lm_head.weight" in ties:
        raise CheckpointError("lm_head.weight is tied, and config.json says tie_word_embeddings: false")


def _check_stored_head(shape: Shape, source: Checkpoint) -> None:
    """Refuse files whose head is not what config.json says. llama.cpp goes by the tensors, transformers by the flag."""
    tied, head, table = (
        bool(shape.config.get("tie_word_embeddings")),
        "lm_head.weight",
        "model.embed_tokens.weight",
    )
    if head in source.ties or table not in {*source.dense, *source.layers}:
        return
    if not tied and head not in {*source.dense, *source.layers}:
        raise CheckpointError(
            f"the files have no {head}, and config.json does not say tie_word_embeddings: true; llama.cpp would take "
            f"{table} for it"
        )
    pair = [source.dense.get(name) for name in (head, table)]
    same = None not in pair and len({x.float32().tobytes() for x in pair if x is not None}) == 1
    if tied and head in {*source.dense, *source.layers} and not same:
        raise CheckpointError(
            f"{head} differs from {table}, and config.json says tie_word_embeddings: true; correct one of them"
        )


def _left_out(source: Checkpoint, shape: Shape) -> list[str]:
    """Name the tensors of the files that have no place in the model."""
    names = [*source.layers, *(part for name in source.dense for part in shape.parts(name))]
    absent = [name for name in names if not shape.tensors(name)]
    more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    return [
        f"left out, since the model of config.json has no such part: {', '.join(absent[:3])}{more}"
    ] * bool(absent)


def _check_type(name: str, dtype: str) -> None:
    if dtype not in _DENSE:
        raise CheckpointError(f"tensor {name!r}: of type {dtype}; GGUF holds F32, F16 and BF16")


def _dense(name: str, tensor: RawTensor, order: NDArray[np.int64]) -> _Stored:
    _check_type(name, tensor.dtype)
    # llama.cpp needs vectors in F32, which holds every 16-bit number.
    if len(tensor.shape) == 1 or tensor.dtype == "F32":
        return _DENSE["F32"], tensor.float32()[order]
    if tensor.dtype == "F16":
        return _DENSE["F16"], tensor.array()[order]
    bytes_of = np.asarray(tensor.data).reshape(tensor.shape[0], -1)
    return _DENSE["BF16"], bytes_of[order]


def _write(
    path: Path,
    shape: Shape,
    stored: Mapping[str, _Stored],
    words: Mapping[str, tuple[Any, ...]],
    forced: str,
) -> None:
    gguf = package()
    writer, of = gguf.GGUFWriter(path, shape.name), gguf.GGUFValueType
    config = shape.config
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(len(shape.order))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    for key, value in shape.header().items():
        kind = of.UINT32 if type(value) is int else of.get_type(value)
        writer.add_key_value(f"{shape.name}.{key}", value, kind)
    writer.add_file_type(min((kind for kind, _ in stored.values()), key=lambda kind: kind.place).number)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, entry in words.items():
        writer.add_key_value(name, *entry)
    if forced:
        writer.add_string(FORCED, forced)
    for name, (stands, data) in stored.items():
        raw = gguf.GGMLQuantizationType[stands.name]
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _compare(path: Path, checkpoint: Checkpoint, shape: Shape) -> int:
    """Read the file with gguf and compare every tensor with the checkpoint's, dequantized."""
    gguf = package()
    written = {t.name: t for t in open_gguf(path).tensors}
    expected: dict[str, Callable[[], NDArray[Any]]] = {
        n: layer.dequantize for n, layer in checkpoint.layers.items()
    }
    expected |= {n: tensor.float32 for n, tensor in shape.apart(checkpoint.dense).items()}
    # The package knows the size of these blocks but not their values.
    raw = {n: x for n, x in checkpoint.layers.items() if x.grid.gguf and x.grid.gguf.name == "Q2_0"}
    expected |= {n: partial(_bytes, x) for n, x in raw.items()}
    n_compared = len(written)
    for name, value in expected.items():
        numbers = value()
        ordered = numbers[shape.rows(name, len(numbers))]
        for target in shape.tensors(name):
            tensor = written.pop(target, None)
            if tensor is None:
                raise CheckpointError(f"{path}: tensor {target}: not in the file")
            again = np.asarray(tensor.data)
            if tensor.tensor_type.name != "Q2_0":
                again = gguf.quants.dequantize(again, tensor.tensor_type)
            if not np.array_equal(again.reshape(numbers.shape), ordered):
                raise CheckpointError(
                    f"{path}: tensor {tensor.name}: reads back differently from what was written"
                )
    if written:
        raise CheckpointError(f"{path}: tensor {sorted(written)[0]}: written and not in the checkpoint")
    return n_compared


def _bytes(layer: QuantizedLayer) -> NDArray[np.uint8]:
    return blocks(layer)[1]


FORMATS.register(GGUF.name)(GGUF())
