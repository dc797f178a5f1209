"""An export that is killed, crowded out, cut off or sent through a link: whole under its name, or not there at all."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash2_train import provenance
from dflash2_train.config import RunConfig, UserError
from dflash2_train.export import hf, workspace
from dflash2_train.export.doctor import ERROR, check_folder
from dflash2_train.export.hf import export_hf
from dflash2_train.export.rewrite import rewrite_papers
from dflash2_train.export.workspace import LOCK, ExportError
from tests.cases import RECORD, make_drafter, make_target_info

EXIT_DONE, EXIT_REFUSED = 0, 3
Export = Callable[[], Path]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The parent of every export here, with nothing else in it."""
    (tmp_path / "exports").mkdir()
    return tmp_path / "exports"


@pytest.fixture
def export(tiny_config: RunConfig, root: Path) -> Export:
    return exporter(tiny_config, root / "drafter")


def exporter(config: RunConfig, final: Path) -> Export:
    """A call that exports the same drafter under ``final``."""
    drafter, info = make_drafter(config), make_target_info(config)
    return lambda: export_hf(drafter, config, info, final, run_record=RECORD)


def in_child(work: Callable[[], Any]) -> int:
    """Run ``work`` in a process of its own and return its id: it may be killed, or kill itself."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = EXIT_DONE
    except UserError:
        status = EXIT_REFUSED
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_arguments: object, **_settings: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def whole(folder: Path) -> bool:
    """Whether a drafter is there and the doctor, who computes every recorded hash, finds no fault but its size."""
    errors = [finding.check for finding in check_folder(folder) if finding.severity == ERROR]
    return not errors and (folder / "run.json").exists()


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# Where an export is killed: function, and what of it has happened by then.
MOMENTS = {
    "while the weights are written": (hf, "write_papers"),
    "before it is examined": (hf, "examine"),
    "before it is renamed": (hf, "replace_folder"),
    "with the earlier one set aside": (workspace, "publish"),
    "with the new one in place": (provenance, "fsync_path"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("earlier", [True, False])
def test_a_kill_leaves_the_earlier_export_or_none_and_the_next_one_leaves_nothing_behind(
    export: Export, root: Path, moment: str, earlier: bool
) -> None:
    module, name = MOMENTS[moment]
    if earlier:
        export()

    def killed() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, die)
            export()

    assert ended(in_child(killed)) == -signal.SIGKILL
    if (root / "drafter").exists():
        assert whole(root / "drafter"), "nothing half-written under the final name"
    export()
    assert whole(root / "drafter")
    assert names(root) == {"drafter"}


def test_kills_at_random_moments_never_spoil_an_export(export: Export, root: Path) -> None:
    draw = random.Random(0)

    def forever() -> None:
        while True:
            export()

    for _ in range(12):
        child = in_child(forever)
        time.sleep(draw.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        assert not (root / "drafter").exists() or whole(root / "drafter")
    assert whole(export())
    assert names(root) == {"drafter"}


def test_a_card_made_anew_brings_back_the_export_that_a_kill_left_aside(export: Export, root: Path) -> None:
    export()
    (root / "drafter").rename(root / ".drafter.replaced")
    rewrite_papers(root / "drafter", [])
    assert whole(root / "drafter")
    assert names(root) == {"drafter"}


def test_two_exports_to_one_folder_the_second_is_told_and_the_first_is_whole(export: Export, root: Path) -> None:
    with workspace.workspace(root / "drafter") as space:
        (space / "half").write_bytes(b"of the first")
        with pytest.raises(ExportError, match="another process is writing it"):
            export()
        assert names(space) == {LOCK, "half"}, "the second leaves the first one's files alone"
    assert names(root) == set()
    assert whole(export())


def test_exports_that_race_end_with_one_whole_folder(export: Export, root: Path) -> None:
    children = [in_child(export) for _ in range(4)]
    outcomes = {ended(child) for child in children}
    assert EXIT_DONE in outcomes
    assert outcomes <= {EXIT_DONE, EXIT_REFUSED}, "whoever came second was refused by a plain message"
    assert whole(root / "drafter")
    assert names(root) == {"drafter"}


def test_a_lock_that_was_removed_under_the_waiting_one_is_not_taken_for_the_lock(root: Path) -> None:
    folder = root / ".drafter.tmp"
    folder.mkdir()
    with open(folder / LOCK, "ab") as old:
        assert workspace._is_at(old, folder / LOCK)
        (folder / LOCK).unlink()
        assert not workspace._is_at(old, folder / LOCK)
        (folder / LOCK).write_bytes(b"of the next")
        assert not workspace._is_at(old, folder / LOCK)


def test_an_export_through_a_link_replaces_what_it_leads_to_and_keeps_the_link(
    tiny_config: RunConfig, tmp_path: Path, root: Path
) -> None:
    link = tmp_path / "latest"
    link.symlink_to(root / "drafter")  # leads nowhere yet
    through = exporter(tiny_config, link)
    for _ in range(2):
        through()
        assert link.is_symlink()
        assert whole(link)
        assert names(root) == {"drafter"}
    assert not (root / "drafter").is_symlink()


def test_a_link_to_somebody_elses_folder_is_refused(tiny_config: RunConfig, tmp_path: Path, root: Path) -> None:
    (root / "thesis.txt").write_text("precious")
    (tmp_path / "latest").symlink_to(root)
    with pytest.raises(ExportError, match="no export wrote"):
        exporter(tiny_config, tmp_path / "latest")()
    assert names(root) == {"thesis.txt"}
    assert (tmp_path / "latest").is_symlink()


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder that nobody, root included, may write to")
@pytest.mark.parametrize("final", ["/sys/kernel/drafter", "/sys/kernel/runs/export"])
def test_a_parent_that_cannot_be_written_to_is_one_plain_message(tiny_config: RunConfig, final: str) -> None:
    with pytest.raises(ExportError, match=r"/sys/kernel/.*could not be written \(.*denied|permitted|Read-only"):
        exporter(tiny_config, Path(final))()


def test_a_disk_that_takes_half_of_the_weights_leaves_the_earlier_export_and_nothing_else(
    export: Export, root: Path
) -> None:
    export()
    size = (root / "drafter" / "model.safetensors").stat().st_size
    before = (root / "drafter" / "run.json").read_bytes()

    def cut_off() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write beyond the limit fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        export()

    assert ended(in_child(cut_off)) == EXIT_REFUSED
    assert (root / "drafter" / "run.json").read_bytes() == before
    assert whole(root / "drafter")
    assert names(root) == {"drafter"}
