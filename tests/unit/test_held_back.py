"""The held-back answers of a stream are captured once, whole, and as this configuration chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from data_gen.cache.format import CacheIntegrityError, CapturedSample
from data_gen.cache.reader import CaptureReader
from data_gen.cache.row_plan import Document
from data_gen.cache.split import WHOLE_FILE, split_documents
from data_gen.held_back import capture_held_back
from dflash2_train.config import StreamConfig, UserError, ValidationConfig
from dflash2_train.ring_rows import WaitStopped, wait_for_held_back
from tests.cache_cases import equal
from tests.ring_cases import MANIFEST, capture, make_documents, sample_of

VALIDATION = ValidationConfig(share=0.4, max_documents=4)


class Engine:
    """Captures documents, counts them, and dies at one of them."""

    def __init__(self, dies_at: int = -1) -> None:
        self.captured, self.dies_at = 0, dies_at

    def __call__(self, documents: Sequence[Document]) -> list[CapturedSample]:
        if self.captured == self.dies_at:
            raise InterruptedError
        self.captured += len(documents)
        return capture(documents, lambda: None)


def held_back(validation: ValidationConfig = VALIDATION) -> list[Document]:
    return split_documents(make_documents(30), share=validation.share, seed=validation.seed)[1]


def run(root: Path, engine: Engine, validation: ValidationConfig = VALIDATION) -> int:
    return capture_held_back(root, MANIFEST, held_back(validation), engine, validation)


def wait(root: Path, validation: ValidationConfig = VALIDATION, *, stopped: bool = False) -> None:
    wait_for_held_back(root, validation, StreamConfig(timeout_s=0.2), lambda: stopped)


def test_the_first_answers_in_the_order_of_validation_are_captured_and_no_more(tmp_path: Path) -> None:
    root = tmp_path / "held_back"
    assert run(root, Engine()) == 4
    reader = CaptureReader(root)
    wanted = held_back()[:4]
    assert [row.sample_id for row in reader.index] == [document.sample_id for document in wanted]
    assert all(equal(reader.read(place), sample_of(document)) for place, document in enumerate(wanted))


def test_a_killed_producer_goes_on_where_it_was_and_the_next_one_has_nothing_to_do(tmp_path: Path) -> None:
    root = tmp_path / "held_back"
    with pytest.raises(InterruptedError):
        run(root, Engine(dies_at=2))
    assert not (root / WHOLE_FILE).exists()
    assert run(root, Engine()) == 2
    assert run(root, Engine()) == 0


def test_a_larger_limit_captures_what_is_missing(tmp_path: Path) -> None:
    root = tmp_path / "held_back"
    run(root, Engine())
    assert run(root, Engine(), ValidationConfig(share=0.4, max_documents=6)) == 2


def test_answers_of_another_choice_are_refused_by_the_producer(tmp_path: Path) -> None:
    root = tmp_path / "held_back"
    run(root, Engine())
    with pytest.raises(CacheIntegrityError, match=r"other answers than train\.validation\.share=0\.4 and seed=3"):
        run(root, Engine(), ValidationConfig(share=0.4, seed=3, max_documents=4))


def test_without_a_share_no_folder_is_made(tmp_path: Path) -> None:
    assert run(tmp_path / "held_back", Engine(), ValidationConfig()) == 0
    assert not (tmp_path / "held_back").exists()


def test_the_trainer_waits_for_all_of_them_and_refuses_another_choice(tmp_path: Path) -> None:
    root = tmp_path / "held_back"
    with pytest.raises(UserError, match=r"no producer with train\.validation\.share=0\.4 has captured them all"):
        wait(root)
    with pytest.raises(WaitStopped):
        wait(root, stopped=True)
    run(root, Engine())
    wait(root)
    with pytest.raises(CacheIntegrityError, match=r"train\.validation\.share: 0\.4 -> 0\.5"):
        wait(root, ValidationConfig(share=0.5))
