"""A server's cumulative counters: read before and after a measurement, taken apart by difference.

Counters add up everything since the server started, so only differences mean anything, and only if the server is the
same one at both readings. A counter that fell, another start time, another number of positions: the measurement is
void. Names: vLLM 0.32 ``v1/metrics/loggers.py`` and ``v1/spec_decode/metrics.py``; SGLang 0.5 ``/metrics``, which has
no counter of accepted tokens, so there acceptance comes with each answer instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash2_train.config import UserError
from dflash2_train.evaluate.runs import Acceptance
from dflash2_train.evaluate.server.exposition import Sample, parse_samples

START_TIME = "process_start_time_seconds"


class CounterError(UserError, RuntimeError):
    """Counters that cannot be used: missing, or not of one server's life."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """One reading, or the difference of two. None = the server has no such counter."""

    started: float | None = None  # when the server's process started, Unix seconds
    running: int = 0  # requests inside the server now
    rounds: int | None = None
    proposed: int | None = None
    accepted: int | None = None
    accepted_per_position: tuple[int, ...] = ()  # as many as the server drafts, K
    output_tokens: int | None = None
    requests: int | None = None  # finished, aborted ones included
    prefix_queries: int | None = None  # prompt tokens looked up in the prefix cache
    prefix_hits: int | None = None
    prefix_caching: bool | None = None

    @property
    def acceptance(self) -> Acceptance | None:
        """The speculation counted; None if the server counts none."""
        if self.rounds is None or self.proposed is None or self.accepted is None:
            return None
        return Acceptance(
            rounds=self.rounds,
            proposed=self.proposed,
            accepted=self.accepted,
            accepted_per_position=list(self.accepted_per_position),
        )

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of prompt tokens found in the prefix cache; None if not counted."""
        if self.prefix_queries is None or self.prefix_hits is None:
            return None
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


CUMULATIVE = ("rounds", "proposed", "accepted", "output_tokens", "requests", "prefix_queries", "prefix_hits")
VLLM_NAMES = {
    "rounds": "vllm:spec_decode_num_drafts_total",
    "proposed": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "requests": "vllm:request_success_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
}
VLLM_POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
VLLM_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")
SGLANG_NAMES = {
    "rounds": "sglang:spec_verify_calls_total",
    "output_tokens": "sglang:generation_tokens_total",
    "requests": "sglang:num_requests_total",
}
SGLANG_BUSY = ("sglang:num_running_reqs", "sglang:num_queue_reqs")


def read_vllm(page: str, model: str, url: str) -> Counters:
    """The counters of ``model`` on a vLLM's ``/metrics``, summed over its engines.

    Raises:
        CounterError: the page is not Prometheus text, or it has no counters of this model.
    """
    samples = _samples(page, model, url)
    found = _sums(samples, VLLM_NAMES)
    if found["output_tokens"] is None:
        raise CounterError(
            f"{url}/metrics: no counter {VLLM_NAMES['output_tokens']} of model {model!r}, so nothing can be measured. "
            "Start vLLM without --disable-log-stats, and check eval.server.engine and eval.server.model."
        )
    positions: dict[int, int] = {}
    for sample in samples:
        if sample.name == VLLM_POSITIONS:
            position = int(sample.labels["position"])
            positions[position] = positions.get(position, 0) + round(sample.value)
    return Counters(
        started=_started(samples),
        running=_busy(samples, VLLM_BUSY),
        accepted_per_position=tuple(positions[k] for k in sorted(positions)),
        prefix_caching=_prefix_caching(samples),
        **found,
    )


def read_sglang(page: str, model: str, url: str) -> Counters:
    """What a SGLang's ``/metrics`` counts; acceptance itself is not among it.

    Raises:
        CounterError: the page is not Prometheus text.
    """
    samples = _samples(page, model, url)
    return Counters(
        started=_started(samples),
        running=_busy(samples, SGLANG_BUSY),
        accepted_per_position=(),
        prefix_caching=None,
        **_sums(samples, SGLANG_NAMES),
    )


def difference(before: Counters, after: Counters, url: str) -> Counters:
    """What was counted between two readings.

    Raises:
        CounterError: the server is not the same, or a counter fell.
    """
    restarted = f"{url}: the server was restarted during the measurement"
    advice = "These figures are void. Keep the server up and run the command again; finished measurements are kept."
    if before.started != after.started:
        raise CounterError(f"{restarted} (start time {before.started} -> {after.started}). {advice}")
    if len(before.accepted_per_position) != len(after.accepted_per_position):
        raise CounterError(f"{restarted} (it counts another number of positions). {advice}")
    changes: dict[str, int | None] = {}
    for name in CUMULATIVE:
        one, two = vars(before)[name], vars(after)[name]
        if (one is None) != (two is None) or (one is not None and two < one):
            raise CounterError(f"{restarted} (counter {name} went from {one} to {two}). {advice}")
        changes[name] = None if one is None else two - one
    pairs = zip(before.accepted_per_position, after.accepted_per_position, strict=True)
    positions = tuple(two - one for one, two in pairs)
    if positions and min(positions) < 0:
        raise CounterError(f"{restarted} (accepted tokens by position fell). {advice}")
    return replace(after, accepted_per_position=positions, **changes)  # type: ignore[arg-type]


def _samples(page: str, model: str, url: str) -> list[Sample]:
    """The samples of ``model``, and those that belong to no model."""
    try:
        return [sample for sample in parse_samples(page) if sample.labels.get("model_name", model) == model]
    except ValueError as error:
        raise CounterError(
            f"{url}/metrics: {error}. Check eval.server.url, which must be the server itself, and eval.server.engine."
        ) from error


def _sums(samples: list[Sample], names: dict[str, str]) -> dict[str, int | None]:
    sums: dict[str, int | None] = dict.fromkeys(names)
    by_name = {name: key for key, name in names.items()}
    for sample in samples:
        key = by_name.get(sample.name)
        if key is not None:
            sums[key] = (sums[key] or 0) + round(sample.value)
    return sums


def _busy(samples: list[Sample], names: tuple[str, ...]) -> int:
    return round(sum(sample.value for sample in samples if sample.name in names))


def _started(samples: list[Sample]) -> float | None:
    return next((sample.value for sample in samples if sample.name == START_TIME), None)


def _prefix_caching(samples: list[Sample]) -> bool | None:
    for sample in samples:
        if sample.name == "vllm:cache_config_info" and "enable_prefix_caching" in sample.labels:
            return sample.labels["enable_prefix_caching"] == "True"
    return None
