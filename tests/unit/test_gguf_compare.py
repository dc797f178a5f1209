"""The table of errors: drafts are the runner's, a lossless file differs in nothing, coarser types in more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from data_gen.cache.reader import CaptureReader
from dflash2_train.config import RunConfig
from dflash2_train.export.gguf_compare import (
    Comparison,
    DraftedRow,
    ProbeRow,
    _matched,
    captured_rows,
    draft_row,
    random_rows,
)
from dflash2_train.export.gguf_export import export_gguf, gguf_folder
from dflash2_train.export.gguf_source import DrafterFolder
from dflash2_train.export.gguf_types import GgufError
from dflash2_train.runner.propose import DraftProposer
from dflash2_train.target import FrozenHead
from tests.cases import edit_json, make_drafter
from tests.gguf_cases import gguf_config, save_drafter, save_tokenizer
from tests.tiny_target import save_tiny_llama, write_cache


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, drafter and a capture cache of the target's own text; nobody edits them."""
    root = tmp_path_factory.mktemp("compare")
    config = gguf_config(root)
    model = save_tiny_llama(Path(config.target.name), config)
    save_tokenizer(Path(config.target.name), num_tokens=config.target.vocab_size - 6)
    write_cache(model, config, samples=4, length=24)
    save_drafter(config, root / "drafter")
    return root


@pytest.fixture
def config(base: Path, tmp_path: Path) -> RunConfig:
    config = gguf_config(tmp_path)
    config.target.name, config.data.root = str(base / "target"), str(base / "data")
    config.export.gguf.source = str(base / "drafter")
    config.export.gguf.compare_blocks = 12
    return config


def table(config: RunConfig) -> dict[str, Comparison]:
    """Type -> comparison of the record that an export leaves."""
    record = json.loads((export_gguf(config) / "gguf.json").read_text())
    return {record["files"][name]["type"]: Comparison(**one) for name, one in record["comparison"]["files"].items()}


def test_an_exact_file_changes_nothing_and_coarser_types_change_more(config: RunConfig) -> None:
    """BF16 rounds one thing here: the token table, which comes from a target in fp32."""
    config.export.gguf.types = ["F32", "BF16", "Q8_0", "Q4_0"]
    found = table(config)
    exact = found["F32"]
    assert (exact.hidden_error, exact.top_changed, exact.path_changed, exact.blocks_changed) == (0.0, 0.0, 0.0, 0.0)
    assert exact.matched == exact.matched_reference
    assert 0 < found["BF16"].hidden_error < found["Q8_0"].hidden_error < found["Q4_0"].hidden_error < 1


def test_leaving_the_mask_vector_out_shows_in_the_table_of_a_lossless_type(config: RunConfig) -> None:
    config.export.gguf.embedding = "target"
    assert table(config)["F32"].hidden_error > 1e-3


def test_the_table_says_what_it_was_measured_on(config: RunConfig) -> None:
    folder = export_gguf(config)
    record = json.loads((folder / "gguf.json").read_text())["comparison"]
    assert (record["inputs"], record["blocks"]) == ("captured data", 12)
    assert "12 blocks of captured data" in (folder / "README.md").read_text()
    config.export.gguf.compare_on = "random"
    folder = export_gguf(config)
    assert "12 blocks of random inputs" in (folder / "README.md").read_text()
    assert "confirmed" not in (folder / "README.md").read_text()


def test_asking_for_captured_data_where_there_is_none_is_refused(config: RunConfig, tmp_path: Path) -> None:
    config.data.root, config.export.gguf.compare_on = str(tmp_path / "empty"), "capture"
    with pytest.raises(GgufError, match=r"export\.gguf\.compare_on=capture"):
        export_gguf(config)
    assert not gguf_folder(config).exists()  # told before anything is written


def test_data_captured_for_other_taps_is_refused(config: RunConfig, tmp_path: Path) -> None:
    source = save_drafter(config, tmp_path / "drafter")
    edit_json(source / "config.json", dflash_config__target_layer_ids=[0, 3, 4])
    config.export.gguf.source = str(source)
    with pytest.raises(GgufError, match=r"captured for taps \[0, 2, 4\] of size 32, the drafter reads \[0, 3, 4\]"):
        export_gguf(config)


def test_the_same_files_are_not_measured_twice(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = table(config)
    monkeypatch.setattr("dflash2_train.export.gguf_export.compare", None)
    assert table(config) == first


def test_captured_rows_are_contexts_of_real_text_with_the_tokens_that_follow(base: Path) -> None:
    reader, shape = CaptureReader(base / "data" / "capture"), DrafterFolder(base / "drafter").shape
    rows = captured_rows(base / "data" / "capture", shape, num_blocks=20)
    assert sum(len(row.anchors) for row in rows) == 20
    for index, row in enumerate(rows):
        sample = reader.read(index)
        last = int(row.anchors[-1])
        assert torch.equal(row.tap_hidden, sample.tap_hidden[:last].float())
        assert row.labels is not None
        for anchor, labels in zip(row.anchors.tolist(), row.labels, strict=True):
            text = sample.input_ids[anchor + 1 : anchor + shape.block_size].tolist()
            assert labels.tolist() == text + [-1] * (shape.num_drafted - len(text))


def test_random_rows_are_the_same_in_every_call(base: Path) -> None:
    shape = DrafterFolder(base / "drafter").shape
    first, second = random_rows(shape, num_blocks=11), random_rows(shape, num_blocks=11)
    assert sum(len(row.anchors) for row in first) == 11
    assert all(torch.equal(a.tap_hidden, b.tap_hidden) for a, b in zip(first, second, strict=True))


@torch.inference_mode()
def test_the_drafts_that_are_compared_are_those_of_the_runner(base: Path, config: RunConfig) -> None:
    """Contexts of up to 23 tokens, the sliding layer's window being 6."""
    drafter = make_drafter(config).float().eval()
    head = FrozenHead.load(config.target, dtype="float32")

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return drafter.embed_blocks(ids, head.embedding)

    for row in captured_rows(base / "data" / "capture", drafter.shape, num_blocks=12):
        drafted = draft_row(drafter, row, embed, head.head)
        for index, anchor in enumerate(row.anchors.tolist()):
            proposer = DraftProposer(
                drafter, embedding_weight=head.embedding, head_weight=head.head, num_drafted=3, capacity=64
            )
            proposer.observe(row.tap_hidden[:anchor])
            proposal = proposer.propose(int(row.input_ids[anchor]), anchor)
            assert drafted.path_ids[index].tolist() == proposal.draft_ids.tolist()


def test_matched_tokens_end_at_the_first_that_the_data_does_not_have() -> None:
    labels = torch.tensor([[1, 2, 3], [4, 5, -1]])
    row = ProbeRow(input_ids=torch.zeros(3), tap_hidden=torch.zeros(2, 1), anchors=torch.tensor([1, 2]), labels=labels)
    path = torch.tensor([[1, 9, 3], [4, 5, 6]])
    drafted = DraftedRow(hidden=torch.zeros(2, 3, 1), top_ids=path, path_ids=path)
    assert _matched([row], [drafted]) == 1.5
