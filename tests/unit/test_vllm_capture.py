"""Our side of reading states through vLLM, on stand-ins: one writer, a bounded queue, honest row counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_gen.backends.base import CaptureRequest, states_fault
from data_gen.backends.state_files import write_states
from tests.fake_vllm import import_backend

HIDDEN, TOP_K, LAST = 4, 2, 5
TAPS = [1, 3]


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, False), (3, False)])
def test_one_tensor_parallel_rank_writes_and_reports_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, writes: bool
) -> None:
    module = import_backend(monkeypatch, "vllm_connector", rank=rank)
    connector = module.TapConnector.__new__(module.TapConnector)
    connector._scratch, connector._cache = tmp_path, torch.arange(48.0).reshape(2, 2, 3, HIDDEN)
    save = module._Save("r", [7, 8, 9, 10], [1, 0])
    connector.has_connector_metadata = lambda: True
    connector._get_connector_metadata = lambda: module.TapConnectorMetadata(saves=[save])
    assert connector.get_finished(set()) == (({"r"}, None) if writes else (None, None))
    assert [path.name for path in tmp_path.iterdir()] == (["r.safetensors"] if writes else [])
    assert connector.get_finished_count() == 1, "vLLM waits for one worker, not for all"


class Engine:
    """Finishes two requests a step; their states appear one step after."""

    def __init__(self, scratch: Path, *, rows_lost: int = 0, cached: int = 0) -> None:
        self.scratch, self.rows_lost, self.cached = scratch, rows_lost, cached
        self.waiting: list[tuple[str, list[int]]] = []
        self.late: list[tuple[Path, list[int]]] = []
        self.most = 0

    def add_request(self, name: str, prompt: Any, _parameters: Any) -> None:
        self.waiting.append((name, prompt.prompt_token_ids))
        self.most = max(self.most, len(self.waiting))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        for path, ids in self.late:
            write_states(path, states_of(ids)[: len(ids) - self.rows_lost], ids)
        self.late = []
        done, self.waiting = self.waiting[:2], self.waiting[2:]
        outputs = []
        for name, ids in done:
            path = self.scratch / f"{name}.safetensors"
            self.late.append((path, ids))
            answer = SimpleNamespace(token_ids=[3], logprobs=[{3: SimpleNamespace(logprob=-0.5)}])
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    outputs=[answer],
                    kv_transfer_params={"states_file": str(path)},
                    num_cached_tokens=self.cached,
                )
            )
        return outputs


def states_of(ids: list[int]) -> torch.Tensor:
    """[S, 3, H]: layers 1, 3 and 5, each telling its layer and token."""
    layers = torch.tensor([1.0, 3.0, float(LAST)])[None, :, None]
    return (10 * layers + torch.tensor(ids)[:, None, None]).expand(-1, -1, HIDDEN).contiguous()


def capturer(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Any:
    module = import_backend(monkeypatch, "vllm_engine")
    made = module.VllmCapturer.__new__(module.VllmCapturer)
    made.engine, made._max_queued, made._slots, made._taps = engine, 3, [*TAPS, LAST], TAPS
    made._parameters = SimpleNamespace(clone=lambda: None)

    def rows(final: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The teacher's ids say which states it was asked about."""
        ids = final[:, :TOP_K].to(torch.int32)
        return ids, torch.zeros(len(final), TOP_K, dtype=torch.float16), torch.ones(len(final))

    made._head = SimpleNamespace(rows=rows)
    return made


def requests(count: int) -> Iterator[CaptureRequest]:
    for number in range(count):
        yield CaptureRequest(request_id=f"r{number}", input_ids=[number, 10, 20, 30], first_teacher_row=1)


def test_states_come_back_by_layer_with_the_last_one_kept_for_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    found = {states.request_id: states for states in capturer(monkeypatch, engine).capture(requests(7), lambda: None)}
    assert sorted(found) == [f"r{number}" for number in range(7)]
    assert engine.most <= 3, "no more requests inside the engine than it has room for"
    assert not list(tmp_path.iterdir()), "state files are gone once read"
    for number, request in enumerate(requests(7)):
        states = found[f"r{number}"]
        assert states_fault(request, states) == ""
        first = states.tap_hidden[0].tolist()
        assert first == [10.0 + number] * HIDDEN + [30.0 + number] * HIDDEN
        assert states.teacher_ids[:, 0].tolist() == [0, 60, 70, 80]
        assert (states.next_id, states.next_logprob) == (3, -0.5)


@pytest.mark.parametrize(
    ("fault", "reason"), [({"rows_lost": 1}, "3 rows for 4 tokens"), ({"cached": 2}, "prefix cache")]
)
def test_lost_rows_and_prefix_hits_reach_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, int], reason: str
) -> None:
    (states,) = capturer(monkeypatch, Engine(tmp_path, **fault)).capture(requests(1), lambda: None)
    assert reason in states_fault(next(requests(1)), states)
