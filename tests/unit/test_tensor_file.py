"""Reading a safetensors file by name, with its hash on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash2_train.export import tensor_file
from dflash2_train.export.tensor_file import TensorFile
from dflash2_train.provenance import sha256_file


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 64)  # so that tensors and gaps come in several pieces
    torch.manual_seed(0)
    tensors = {"a": torch.randn(9, 7), "b": torch.randn(40).bfloat16(), "c": torch.tensor(2.0), "d": torch.empty(0, 3)}
    tensors |= {"e": torch.randn(3, 5).half(), "f": torch.randn(50)}
    save_file(tensors, tmp_path / "some.safetensors", metadata={"format": "pt"})
    return tmp_path / "some.safetensors"


@pytest.mark.parametrize("order", ["abcdef", "fedcba", "ace", "f", "", "aabbff", "cfabde"])
def test_values_and_hash_are_the_files_own_in_whatever_order_it_is_read(path: Path, order: str) -> None:
    whole, file = load_file(path), TensorFile(path)
    for name in order:
        assert torch.equal(file.read(name), whole[name]) and file.read(name).dtype == whole[name].dtype
    assert file.sha256() == sha256_file(path)
    assert file.sha256() == sha256_file(path), "asked again it is the same"
    assert torch.equal(file.read("b"), whole["b"]), "and reading goes on"


@pytest.mark.parametrize("num_values", [None, 7, 1000])
@pytest.mark.parametrize("order", ["abcdef", "fedcba", "aa", "e"])
def test_pieces_are_the_tensor_in_order_and_the_hash_comes_with_them(
    path: Path, order: str, num_values: int | None
) -> None:
    whole, file = load_file(path), TensorFile(path)
    for name in order:
        pieces = list(file.pieces(name, num_values))
        assert torch.equal(torch.cat([whole[name].new_empty(0), *pieces]), whole[name].flatten())
        limit = num_values or 64 // whole[name].element_size()
        assert all(len(piece) == limit for piece in pieces[:-1])
    assert file.sha256() == sha256_file(path)


def test_readers_that_stop_midway_or_cross_each_other_leave_the_hash_right(path: Path) -> None:
    whole, file = load_file(path), TensorFile(path)
    first = file.pieces("a", 7)
    next(first)
    assert torch.equal(file.read("f"), whole["f"])
    crossed = torch.cat([piece for pair in zip(first, file.pieces("a", 7), strict=False) for piece in pair])
    assert torch.equal(crossed[:7], whole["a"].flatten()[7:14]) and torch.equal(crossed[7:14], whole["a"].flatten()[:7])
    assert file.sha256() == sha256_file(path)


def test_a_file_that_is_cut_while_it_is_read_is_no_tensor_of_zeros(path: Path) -> None:
    file = TensorFile(path)
    path.write_bytes(path.read_bytes()[:-1])
    last = max(file._places, key=lambda name: file._places[name][1])
    with pytest.raises(ValueError, match=f"{last} cannot be read.*ends before"):
        file.read(last)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F32", "shape": [8], "data_offsets": [0, 16]},
    ],
)
def test_a_header_with_impossible_sizes_is_refused_before_memory_is_taken(tmp_path: Path, entry: dict) -> None:
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match="cannot be read"):
        TensorFile(path)


def test_a_header_that_claims_to_be_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="cannot be read"):
        TensorFile(path)
