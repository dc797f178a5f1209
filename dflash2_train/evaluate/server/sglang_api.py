"""SGLang's server: ``/generate`` with token ids, whose ``meta_info`` carries each request's own counts.

SGLang keeps no counter of accepted tokens, only averages since its start, so the counts of the answers are added up.
``/metrics`` (``--enable-metrics``) is read where there is one, to notice restarts and other people's requests. vLLM
counts what was verified; some versions of SGLang count a last round only up to the stop inside it, which reads lower by
up to one round an answer. Names of the counts changed over versions (``spec_accept_token_num``,
``spec_num_correct_drafts``); all are read, and must agree with the histogram.
"""

from __future__ import annotations

from typing import Any

import httpx

from dflash2_train.evaluate.server.connection import ServerError, address, call, get_object
from dflash2_train.evaluate.server.counters import Counters, read_sglang
from dflash2_train.evaluate.server.messages import (
    Answer,
    Ask,
    Asking,
    BadAnswerError,
    RequestAcceptance,
    ServerFacts,
    checked_acceptance,
)

INFO_PAGES = ("/server_info", "/get_server_info")
ACCEPTED_NAMES = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
PROPOSED_NAMES = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM_NAMES = ("spec_correct_drafts_histogram", "spec_accept_histogram")
# Of the server's arguments: what shapes speed or output. Nothing else is kept, keys least of all.
FLAGS = (
    "model_path",
    "revision",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "dp_size",
    "ep_size",
    "context_length",
    "attention_backend",
    "mem_fraction_static",
    "max_running_requests",
    "disable_radix_cache",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_eagle_topk",
)


class SglangApi:
    """See :class:`dflash2_train.evaluate.server.messages.EngineApi`."""

    async def facts(self, client: httpx.AsyncClient, model: str) -> ServerFacts:
        """Raises ServerError if the server tells nothing about itself, or serves another model."""
        info: dict[str, Any] | None = None
        for page in INFO_PAGES:
            info = info or await get_object(client, page)
        if not info or "model_path" not in info:
            raise ServerError(
                f"{address(client)}: neither {' nor '.join(INFO_PAGES)} describes a SGLang server. Check "
                "eval.server.url and eval.server.engine."
            )
        served = str(info.get("served_model_name") or info["model_path"])
        if model and model not in (served, info["model_path"]):
            raise ServerError(f"{address(client)}: serves {served!r}, not eval.server.model={model!r}. Correct it.")
        draft_tokens = info.get("speculative_num_draft_tokens")
        speculates = info.get("speculative_algorithm") is not None
        radix_off = info.get("disable_radix_cache")
        return ServerFacts(
            engine="sglang",
            version=str(info["version"]) if info.get("version") else None,
            model=served,
            context=_integer(info.get("context_length")) or _integer(info.get("max_total_num_tokens")),
            num_drafted=draft_tokens - 1 if speculates and isinstance(draft_tokens, int) else None,
            prefix_caching=None if radix_off is None else not radix_off,
            flags={name: info[name] for name in FLAGS if info.get(name) is not None},
        )

    async def counters(self, client: httpx.AsyncClient, model: str) -> Counters | None:
        """None without ``--enable-metrics``: answers carry their own counts."""
        response = await call(client, "GET", "/metrics")
        if response is None:
            return None
        return read_sglang(response.text, model, address(client))

    async def make_cold(self, client: httpx.AsyncClient) -> None:
        """Empty the radix cache."""
        if await call(client, "POST", "/flush_cache") is None:
            raise ServerError(
                f"{address(client, '/flush_cache')}: there is no such page, so the prefix cache cannot be emptied. "
                "Set eval.server.cold_prefix_cache=false; the report will say what was found in it."
            )

    def request(self, ask: Ask, asking: Asking) -> tuple[str, dict[str, Any]]:
        """The engine's own request, which takes ids as they are."""
        assert ask.prompt_ids is not None, "the configuration allows client templates only"
        sampling = {
            "temperature": asking.temperature,
            "top_p": asking.top_p,
            "top_k": asking.top_k or -1,
            "min_p": asking.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": ask.max_new_tokens,
            "min_new_tokens": 0,
            "ignore_eos": False,
            "skip_special_tokens": False,
        }
        return "/generate", {"input_ids": ask.prompt_ids, "sampling_params": sampling, "stream": False}

    def answer(self, body: dict[str, Any]) -> Answer:
        """Text, tokens and counts of a generation."""
        try:
            meta = body["meta_info"]
            reason = (meta["finish_reason"] or {}).get("type")
            prompt_tokens, output_tokens = int(meta["prompt_tokens"]), int(meta["completion_tokens"])
            text = str(body["text"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadAnswerError("no answer in the response", f"{type(error).__name__}: {error}") from error
        if reason not in ("stop", "length"):
            raise BadAnswerError(f"finish_reason {reason!r}")
        return Answer(
            text=text,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            finish_reason=reason,
            acceptance=_acceptance(meta),
            cached_tokens=_integer(meta.get("cached_tokens")),
        )


def _acceptance(meta: dict[str, Any]) -> RequestAcceptance | None:
    """A request's counts; None where the server tells none, as for an answer of one token."""
    rounds = _integer(meta.get("spec_verify_ct"))
    accepted, proposed = (_first(meta, names) for names in (ACCEPTED_NAMES, PROPOSED_NAMES))
    if rounds is None or accepted is None or proposed is None:
        return None
    histogram: list[int] = next((meta[name] for name in HISTOGRAM_NAMES if isinstance(meta.get(name), list)), [])
    return checked_acceptance(
        rounds=rounds, proposed=proposed, accepted=accepted, histogram=[int(count) for count in histogram]
    )


def _first(meta: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(meta[name]) for name in names if meta.get(name) is not None), None)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
