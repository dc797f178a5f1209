"""The step benchmark: it still runs, its bound counts what a step needs, and all sides are measured alike."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.bench import train_step
from tests.bench.peers import PEERS, Peer
from tests.bench.step_clock import peak_growth
from tests.bench.step_ours import loss_of, make_batch, make_objective, unfused_loss
from tests.bench.train_step import COLUMNS, WORKLOADS, Figures, Side, cells, in_turns, over_rounds

TINY = replace(WORKLOADS["tiny"], vocab=512, tokens=128, anchors=16, intermediate=128)


@pytest.mark.parametrize("loss", [loss_of, unfused_loss])
def test_the_bound_is_a_little_less_than_what_a_step_computes(loss: object) -> None:
    device = torch.device("cpu")
    objective = make_objective(TINY, device, torch.float32)
    batch, blocks = make_batch(TINY, TINY.anchors, device, torch.float32)
    with FlopCounterMode(display=False) as counter:
        value = loss(objective, batch, blocks)  # type: ignore[operator]
        value.backward()
    assert value.isfinite()
    needed = TINY.forward_backward_flops()
    assert 0.7 * counter.get_total_flops() < needed < 1.05 * counter.get_total_flops()


def figures(step_s: float, peak_bytes: float, loss_bytes: float = 0.0) -> Figures:
    core = {"step_s": step_s, "forward_backward_s": step_s, "cpu_s": 2 * step_s, "loss": 1.0}
    return {**core, "peak_bytes": peak_bytes, "start_bytes": 1e9, "loss_bytes": loss_bytes}


def test_a_figure_is_the_median_of_its_rounds_and_a_peak_the_largest() -> None:
    found = over_rounds([figures(1.0, 3e9, 5.0), figures(9.0, 1e9, 4.0), figures(2.0, 2e9, 7.0)])
    assert (found["step_s"], found["cpu_s"]) == (2.0, 4.0)
    assert (found["peak_bytes"], found["loss_bytes"]) == (3e9, 5.0)
    assert (found["fastest_s"], found["slowest_s"]) == (1.0, 9.0)


def test_the_sides_take_turns_and_keep_their_own_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def measured(side: Side, *_: object) -> Figures:
        calls.append(side.name)
        return figures(float(len(calls)), 1e9)

    monkeypatch.setattr(train_step, "measured", measured)
    sides = [Side("ours", ()), Side("theirs", ())]
    found = in_turns(sides, TINY, "float32", argparse.Namespace(rounds=3))
    assert calls == ["ours", "theirs"] * 3
    assert [[one["step_s"] for one in rounds] for rounds in found] == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert "round 3 of 3, theirs: 6.000 s a step" in capsys.readouterr().err


def test_a_row_gives_time_and_memory_as_multiples_of_ours() -> None:
    ours = over_rounds([figures(0.5, 2e9, TINY.full_logits_bytes / 10)])
    row = cells("theirs", TINY, "float32", over_rounds([figures(2.0, 3e9)]), ours)
    assert len(row) == len(COLUMNS)
    time_ratio, memory_ratio = (at for at, name in enumerate(COLUMNS) if name == "x ours")
    assert (row[time_ratio], row[memory_ratio]) == ("4.00", "1.50")
    assert cells("ours", TINY, "float32", ours, ours)[COLUMNS.index("loss x")] == "0.100"


def test_the_memory_of_a_loss_is_that_of_the_tensors_it_holds_at_once() -> None:
    def work() -> None:
        first, second = torch.zeros(1 << 20), torch.zeros(1 << 18)  # 4 MiB and 1 MiB
        del first
        _ = second + torch.zeros(1 << 18)  # 3 MiB at once

    assert peak_growth(work, "cpu") == 5 << 20


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.package)
def test_a_peer_has_a_script_and_shares_our_torch_and_transformers(peer: Peer) -> None:
    assert importlib.util.find_spec(f"tests.bench.{peer.module}")
    torch_pin, transformers_pin = peer.requirements()[:2]
    assert torch_pin == f"torch=={torch.__version__.split('+')[0]}" and transformers_pin.startswith("transformers==")


def test_a_complete_environment_is_used_again_and_a_folder_of_the_users_never_replaced(tmp_path: Path) -> None:
    peer = PEERS[-1]
    folder = tmp_path / peer.package.replace("==", "-")
    folder.mkdir()
    with pytest.raises(SystemExit, match="exists and is no environment"):
        peer.interpreter(tmp_path)
    (folder / "complete").write_text("\n".join((*peer.requirements(), peer.package)))
    assert peer.interpreter(tmp_path) == folder / "bin" / "python"
