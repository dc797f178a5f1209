"""A short run of the target, to measure what a plan would otherwise estimate: tokens answered and captured a second.

Half of the time goes to each stage; starting the engine is not counted. Answers of the probe are cut short, so that
some end within it, and nothing is stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from data_gen.backends import open_capturer, open_generator
from data_gen.backends.base import CaptureRequest, Completion, GenerationRequest, take_from
from data_gen.prepare import PreparedPrompts
from data_gen.turns import Dialogue, row_seed, turn_points
from dflash2_train.config import ConfigError, RunConfig

logger = logging.getLogger(__name__)
ANSWER_TOKENS = 128  # at most, of an answer of the probe
REQUESTS_A_SLOT = 4  # of the engine
SAY_EVERY = 5.0  # seconds between progress lines


class _TimeOver(Exception):  # noqa: N818 - not an error: the probe has seen enough
    """Raised out of an engine's loop when the time is over."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Rates of this machine."""

    answer_tokens_per_s: float
    captured_tokens_per_s: float


def _stopwatch(seconds: float, what: str, count: Callable[[], int]) -> Callable[[], None]:
    """A heartbeat that reports ``count`` tokens now and then and ends the loop after ``seconds``."""
    started = time.monotonic()
    said = started

    def beat() -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= SAY_EVERY:
            said = now
            logger.info("probe: %s, %d tokens in %.0f s of %.0f", what, count(), now - started, seconds)
        if now - started >= seconds:
            raise _TimeOver

    return beat


def probe(config: RunConfig, prepared: PreparedPrompts) -> ProbeResult:
    """Measure both rates, in about ``plan.probe_seconds`` and the starts of two engines.

    Raises:
        ConfigError: the time was too short for one answer.
    """
    seconds = config.plan.probe_seconds / 2
    sampling = replace(prepared.sampling, max_tokens=min(ANSWER_TOKENS, prepared.sampling.max_tokens))
    requests = _requests(config, prepared)
    answered: dict[str, Completion] = {}

    def written() -> int:
        return sum(len(done.completion_ids) for done in answered.values())

    generator = open_generator(config, prepared.folder, sampling)
    started = time.monotonic()
    try:
        for done in generator.generate(take_from(requests), _stopwatch(seconds, "answers", written)):
            if isinstance(done, Completion):
                answered[done.request_id] = done
    except _TimeOver:
        logger.info("probe: time for answers is over")
    finally:
        generator_seconds = time.monotonic() - started
        generator.close()
    if not answered:
        raise ConfigError(
            f"plan.probe_seconds={config.plan.probe_seconds}: no answer ended within {seconds:.0f} s. "
            "Give the probe more time, or set plan.regenerate_tokens_per_s and plan.capture_tokens_per_s."
        )
    prompt_ids = {request.request_id: request.prompt_ids for request in requests}
    rate = _capture_rate(config, prepared, prompt_ids, answered, seconds)
    return ProbeResult(answer_tokens_per_s=written() / generator_seconds, captured_tokens_per_s=rate)


def _requests(config: RunConfig, prepared: PreparedPrompts) -> list[GenerationRequest]:
    """First turns of the first prompts, repeated where there are few, so that the engine stays full."""
    wanted = REQUESTS_A_SLOT * config.data.max_num_seqs
    records = prepared.train[:wanted]
    requests = []
    for repeat in range(-(-wanted // len(records))):
        for record in records:
            dialogue = Dialogue(record=record, repeat=repeat, points=turn_points(record.messages, config.data.turns))
            ids = prepared.renderer.prompt_ids(dialogue.messages(), record.tools)
            seed = row_seed(config.data.sampling.seed, record.prompt_id, repeat, 0)
            requests.append(GenerationRequest(request_id=dialogue.name, prompt_ids=ids, seed=seed))
    return requests


def _capture_rate(
    config: RunConfig,
    prepared: PreparedPrompts,
    prompt_ids: dict[str, list[int]],
    answered: dict[str, Completion],
    seconds: float,
) -> float:
    requests = []
    for name, done in answered.items():
        if done.completion_ids:
            prompt = prompt_ids[name]
            ids = [*prompt, *done.completion_ids]
            requests.append(CaptureRequest(request_id=name, input_ids=ids, first_teacher_row=len(prompt) - 1))
    captured: list[int] = []  # tokens of each sample

    def read() -> int:
        return sum(captured)

    capturer = open_capturer(config, prepared.folder)
    started = time.monotonic()
    try:
        for states in capturer.capture(requests, _stopwatch(seconds, "capture", read)):
            captured.append(len(states.input_ids))
    except _TimeOver:
        logger.info("probe: time for capture is over")
    finally:
        taken = time.monotonic() - started
        capturer.close()
    if not captured:
        raise ConfigError(
            f"plan.probe_seconds={config.plan.probe_seconds}: no sample was captured within {seconds:.0f} s. "
            "Give the probe more time, or set plan.capture_tokens_per_s."
        )
    return read() / taken
