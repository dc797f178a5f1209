"""The counters that the evaluation reads are those that the installed vLLM writes, in the format it writes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dflash2_train.evaluate.server.counters import VLLM_BUSY, VLLM_NAMES, VLLM_POSITIONS, difference, read_vllm
from dflash2_train.evaluate.server.vllm_api import FLAGS, VllmApi

prometheus_client = pytest.importorskip("prometheus_client")
MODEL, URL = "toy", "http://x"


def vllm_source(*parts: str) -> str:
    """A file of the installed vLLM as text; vLLM itself is not imported."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(found.origin).parent.joinpath(*parts).read_text()


def test_every_counter_stands_in_vllms_own_source() -> None:
    source = vllm_source("v1", "metrics", "loggers.py") + vllm_source("v1", "spec_decode", "metrics.py")
    for name in (*VLLM_NAMES.values(), VLLM_POSITIONS, *VLLM_BUSY):
        assert f'"{name.removesuffix("_total")}"' in source, name
    assert '"vllm:cache_config_info"' in source


def test_the_counts_of_an_answer_stand_in_vllms_own_protocol() -> None:
    source = vllm_source("entrypoints", "generate", "base", "protocol.py")
    for name in ("acceptance_histogram", "num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens"):
        assert f"    {name}: " in source, name
    assert "speculative_decoding: SpeculativeDecodingMetrics" in source


def test_every_kept_flag_is_a_field_of_vllms_configuration() -> None:
    for section, names in FLAGS.items():
        source = vllm_source("config", f"{section.removesuffix('_config')}.py")
        for name in names:
            assert f"    {name}: " in source, f"{section}.{name}"


def test_a_page_of_the_prometheus_client_is_read_and_differenced() -> None:
    registry = prometheus_client.CollectorRegistry()
    counters = {
        key: prometheus_client.Counter(name.removesuffix("_total"), "text", ["model_name", "engine"], registry=registry)
        for key, name in VLLM_NAMES.items()
    }
    positions = prometheus_client.Counter(
        VLLM_POSITIONS.removesuffix("_total"), "text", ["model_name", "engine", "position"], registry=registry
    )

    def count(engine: str, rounds: int) -> None:
        for counter in counters.values():
            counter.labels(MODEL, engine).inc(rounds)
        for position in range(3):
            positions.labels(MODEL, engine, str(position)).inc(rounds - position)

    count("0", 10**7)
    before = read_vllm(prometheus_client.generate_latest(registry).decode(), MODEL, URL)
    count("0", 40)
    count("1", 7)
    after = read_vllm(prometheus_client.generate_latest(registry).decode(), MODEL, URL)
    window = difference(before, after, URL)
    assert (window.rounds, window.accepted, window.output_tokens) == (47, 47, 47)
    assert window.accepted_per_position == (47, 45, 43)


def test_a_summary_as_vllm_documents_it_is_read() -> None:
    answer = VllmApi().answer(
        {
            "choices": [{"index": 0, "text": "hi", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12},
            "metrics": {
                "speculative_decoding": {
                    "mean_acceptance_length": 2.3333,
                    "draft_acceptance_rate": 0.4444,
                    "acceptance_histogram": [1, 1, 0, 1],
                    "num_spec_steps": 3,
                    "num_accepted_draft_tokens": 4,
                    "num_draft_tokens": 9,
                    "num_spec_tokens": 3,
                }
            },
        }
    )
    assert answer.acceptance is not None
    assert answer.acceptance.accepted_per_position == [2, 1, 1]
