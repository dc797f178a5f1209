"""A drafter that speculators 0.9 itself saved computes the same here once it is converted.

Its interpreter is that of an environment of its own, which ``tests/bench/train_step.py --peer`` builds; without it this
is skipped. ``tests/unit/test_convert.py`` proves the conversion on folders written by hand.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash2_train.export.convert.conversion import Request, convert, plan_conversion
from dflash2_train.export.convert.source import STYLES
from dflash2_train.export.convert.style import Hints
from dflash2_train.export.published import SECOND_KEYS
from dflash2_train.model.drafter import Drafter
from dflash2_train.model.drafter_config import DrafterShape
from dflash2_train.warm_start import warm_drafter

PEER = Path("~/.cache/dflash2-train/bench/speculators-0.9.0/bin/python").expanduser()
SCRIPT = Path(__file__).with_name("run_speculators.py")
HINTS = Hints(num_target_layers=6)
WIDTH = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PEER.exists(), reason="no environment with speculators 0.9.0"),
]


@pytest.fixture(scope="module", params=["dflash", "dflash2"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("peer")
    run_peer(folder, request.param)
    return folder, request.param


def run_peer(folder: Path, *words: str) -> None:
    command = [str(PEER), str(SCRIPT), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def block_states(drafter: Drafter, computed: dict[str, Tensor], block: int) -> Tensor:
    """[W, H] of one block behind the context before its anchor."""
    anchor = int(computed["anchors"][block])
    context = drafter.encode_context(computed["taps"][:, :anchor])
    cached = drafter.project_context(context, torch.arange(anchor)[None])
    ids = torch.full((1, WIDTH), drafter.shape.mask_token_id)
    ids[0, 0] = computed["input_ids"][0, anchor]
    positions = torch.arange(anchor, anchor + WIDTH)[None]
    return drafter.decode_block(drafter.embed_blocks(ids, computed["embedding"]), positions, cached)[0]


@torch.no_grad()
def test_a_saved_drafter_computes_the_same_here(peer: tuple[Path, str], tmp_path: Path) -> None:
    folder, kind = peer
    plan = plan_conversion(folder / "saved", Request(to=STYLES["hf"], hints=HINTS))
    assert plan.keeps_function
    out = convert(plan, tmp_path / "out", name="saved", commit=None)
    computed = load_file(folder / "computed.safetensors")
    shape: DrafterShape = plan.source.drafter.shape
    if kind == "dflash":
        shape = replace(shape, **dict(zip(SECOND_KEYS, (2, 8, 5, 4), strict=True)))
    drafter = warm_drafter(str(out), shape, computed["embedding"])
    for block in range(len(computed["anchors"])):
        found = block_states(drafter, computed, block)
        torch.testing.assert_close(found, computed["hidden"][block], rtol=1e-5, atol=1e-5)
        if kind == "dflash2":
            names = ("unary", "candidates", "predecessors")
            scores = drafter.candidate_selector.scores(found, *(computed[name][block] for name in names))
            torch.testing.assert_close(scores, computed["scores"][block], rtol=1e-5, atol=1e-4)


def test_a_written_folder_is_to_the_package_the_drafter_that_it_saved(peer: tuple[Path, str], tmp_path: Path) -> None:
    folder = peer[0] / "saved"
    plan = plan_conversion(folder, Request(to=STYLES["hf"], hints=HINTS))
    ours = convert(plan, tmp_path / "ours", name="saved", commit=None)
    back = plan_conversion(ours, Request(to=STYLES["speculators"], hints=Hints()))
    written = convert(back, tmp_path / "back", name="ours", commit=None)
    theirs, mine = (load_file(place / "model.safetensors") for place in (folder, written))
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs)
    stated, found = (json.loads((place / "config.json").read_text()) for place in (folder, written))
    ignored = {"transformers_version", "auto_map"}
    assert stated.keys() - ignored <= found.keys()
    same = stated.keys() - ignored - {"transformer_layer_config", "dtype"}
    assert {key: stated[key] for key in same} == {key: found[key] for key in same}
    layers = stated["transformer_layer_config"].items()
    differing = {key: value for key, value in layers if found["transformer_layer_config"].get(key, value) != value}
    assert differing.keys() <= {"max_window_layers", "use_cache"}
    run_peer(*peer, str(written))
