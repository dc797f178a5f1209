"""A stage regenerate in miniature: a toy target on disk, a few prompts, and an engine that answers by rule."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from data_gen import regenerate as stage
from data_gen.backends.base import Completion, Failure, GenerationRequest, Heartbeat, SamplingSettings, TakeRequest
from data_gen.cache.conversations import ConversationStore
from data_gen.prepare import prepare
from dflash2_train.config import PromptSourceConfig, RunConfig, SamplingConfig
from tests.toy_target import END, TEMPLATE, write_model, write_tokenizer

PROMPTS, SHARD, MAX_TOKENS = 10, 4, 5


class Silent:
    def update(self, done: int, facts: str = "") -> None:
        pass


@contextlib.contextmanager
def no_display(_title: str, _total: int, _before: int) -> Iterator[Silent]:
    yield Silent()


def default_answer(request: GenerationRequest) -> Completion | Failure:
    """Every third answer is cut."""
    cut = request.seed % 3 == 0
    ids = [7, 8, 9, 10, 11] if cut else [7, 8, END]
    return Completion(request_id=request.request_id, completion_ids=ids, finish_reason="length" if cut else "stop")


class StubBackend:
    """Draws all there is, answers the newest first; dies after ``alive`` answers, then oldest first."""

    def __init__(
        self,
        alive: int | None = None,
        answer: Callable[[GenerationRequest], Completion | Failure | None] = default_answer,
    ) -> None:
        self.requests: list[GenerationRequest] = []
        self.sampling: SamplingSettings | None = None
        self.alive, self.answer, self.closed = alive, answer, False

    def generate(self, take: TakeRequest, heartbeat: Heartbeat) -> Iterator[Completion | Failure]:
        waiting: list[GenerationRequest] = []
        done = 0
        while True:
            while (request := take()) is not None:
                waiting.append(request)
                self.requests.append(request)
            if not waiting:
                return
            if done == self.alive:
                raise KeyboardInterrupt
            heartbeat()
            done += 1
            result = self.answer(waiting.pop(-1 if self.alive is None else 0))
            if result is not None:
                yield result

    def close(self) -> None:
        self.closed = True


def single_turns(word: str, count: int) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"w{n} {word} w{n + 1}"}] for n in range(count)]


def write_prompts(path: Path, conversations: Sequence[list[dict[str, str]]]) -> None:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))


def make_config(
    tmp_path: Path,
    tiny_config: RunConfig,
    conversations: Sequence[list[dict[str, str]]] | None = None,
    template: str = TEMPLATE,
    **changes: Any,
) -> RunConfig:
    """A configuration over a toy target; ``changes`` go to its data part."""
    target = tmp_path / "target"
    write_tokenizer(target, template)
    write_model(target)
    write_prompts(tmp_path / "train.jsonl", single_turns("w50", PROMPTS) if conversations is None else conversations)
    write_prompts(tmp_path / "holdout.jsonl", single_turns("w60", 2))
    fields = {
        "root": str(tmp_path / "data"),
        "train_prompts": [PromptSourceConfig(kind="jsonl", path=str(tmp_path / "train.jsonl"), license="mit")],
        "holdout_prompts": [PromptSourceConfig(kind="jsonl", path=str(tmp_path / "holdout.jsonl"), license="mit")],
        "sampling": SamplingConfig(max_tokens=MAX_TOKENS),
        "conversations_per_shard": SHARD,
        **changes,
    }
    data = dataclasses.replace(tiny_config.data, **fields)
    named = dataclasses.replace(tiny_config.target, name=str(target))
    return dataclasses.replace(tiny_config, data=data, target=named)


def with_data(config: RunConfig, **changes: Any) -> RunConfig:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def run(config: RunConfig, monkeypatch: pytest.MonkeyPatch, backend: StubBackend) -> stage.ConversationTotals:
    def opened(_config: RunConfig, _folder: Path, sampling: SamplingSettings) -> StubBackend:
        backend.sampling = sampling
        return backend

    monkeypatch.setattr(stage, "open_generator", opened)
    return stage.regenerate(config, prepare(config), no_display)


def rows_of(config: RunConfig) -> dict[str, dict[str, object]]:
    store = ConversationStore(Path(config.data.root))
    return {row["row_id"]: row for index in store.shards() for row in store.read(index)}
