"""Every GGUF tensor type, value by value, against the gguf package's own dequantizers, run live."""

import os
import pathlib
import subprocess

import gguf
import numpy as np
import pytest
from harness import BINARY, MODEL
from gguf import GGMLQuantizationType as Type

VALUES = BINARY.parent / "tests" / "support" / "galley-gguf-values"
COLUMNS = 768
# The package quantizes these; blocks of the others are made up.
QUANTIZED = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
K_QUANTS = [Type.Q4_K, Type.Q5_K, Type.Q6_K]
# Where a K-quant's block holds halves (d, dmin); any other byte may be anything.
HALVES = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,)}


def made_up_blocks(kind: Type, rows: int, random: np.random.Generator) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * COLUMNS // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        d = random.normal(0, 0.01, len(blocks)).astype(np.float16)
        d[::7] *= 1000
        d[::11] = np.float16(2 ** -24)
        blocks[:, at:at + 2] = d.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write(path: pathlib.Path, kinds: list[Type], rows: int, split: int = 0) -> None:
    random = np.random.default_rng(len(kinds))
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    for kind in kinds:
        name = f"{kind.name}.weight"
        if kind in HALVES:
            writer.add_tensor(name, made_up_blocks(kind, rows, random), raw_dtype=kind)
        else:
            values = random.normal(0, 0.05, (rows, COLUMNS)).astype(np.float32)
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path: pathlib.Path, folder: pathlib.Path) -> tuple[list[tuple[str, ...]], np.ndarray]:
    out = folder / "values.bin"
    done = subprocess.run([VALUES, path, out], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    values = np.fromfile(out, np.float32)
    out.unlink()  # a gigabyte for a small model
    return [tuple(line.split()) for line in done.stdout.splitlines()], values


def compare(tensors: list[gguf.ReaderTensor], lines: list[tuple[str, ...]], values: np.ndarray) -> int:
    """Bit for bit, but for the sign of zero. Returns how many matrices were compared."""
    at = 0
    matrices = [t for t in tensors if len(t.shape) == 2]
    assert [line[0] for line in lines] == [t.name for t in matrices]
    for tensor, (name, kind, rows, columns) in zip(matrices, lines):
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert (kind, int(rows), int(columns)) == (tensor.tensor_type.name, *expected.shape), name
        found = values[at:at + expected.size].reshape(expected.shape)
        at += expected.size
        wrong = np.argwhere(found != expected)
        assert len(wrong) == 0, f"{name} {kind}: {len(wrong)} of {expected.size} differ, the first at {wrong[0]}"
    assert at == values.size
    return len(matrices)


def test_every_type_is_read_as_the_gguf_package_reads_it(tmp_path: pathlib.Path) -> None:
    kinds = QUANTIZED + K_QUANTS
    write(tmp_path / "all.gguf", kinds, rows=24)
    lines, values = read(tmp_path / "all.gguf", tmp_path)
    assert compare(gguf.GGUFReader(tmp_path / "all.gguf").tensors, lines, values) == len(kinds)


def test_pieces_written_by_the_gguf_package_are_one_model(tmp_path: pathlib.Path) -> None:
    kinds = QUANTIZED + K_QUANTS
    write(tmp_path / "all.gguf", kinds, rows=8, split=3)
    pieces = sorted(tmp_path.glob("all-*-of-*.gguf"))
    assert len(pieces) == 4
    tensors = [tensor for piece in pieces for tensor in gguf.GGUFReader(piece).tensors]
    for named in (pieces[0], pieces[2]):
        lines, values = read(named, tmp_path)
        assert compare(tensors, lines, values) == len(kinds)


def test_a_wrong_value_would_be_noticed(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "one.gguf", K_QUANTS, rows=2)
    lines, values = read(tmp_path / "one.gguf", tmp_path)
    values[-1] = np.nextafter(values[-1], np.float32(np.inf))
    with pytest.raises(AssertionError, match="1 of 1536 differ"):
        compare(gguf.GGUFReader(tmp_path / "one.gguf").tensors, lines, values)


def real_files() -> list[pathlib.Path]:
    named = os.environ.get("GALLEY_GGUF_FILES", "").split(os.pathsep)
    return [MODEL, *(pathlib.Path(name) for name in named if name)]


@pytest.mark.parametrize("path", real_files(), ids=lambda p: p.name)
def test_real_files(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The default model, and whatever GALLEY_GGUF_FILES names."""
    lines, values = read(path, tmp_path)
    assert compare(gguf.GGUFReader(path).tensors, lines, values) > 0
