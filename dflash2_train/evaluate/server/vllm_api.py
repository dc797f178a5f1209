"""vLLM's server: OpenAI requests, ``/metrics`` for counts, and what it tells about itself.

Acceptance comes from the counters. With ``--per-request-spec-decode-metrics summary`` every answer carries its own
counts too, which gives intervals and figures by prompt length. ``/server_info`` exists only with
``VLLM_SERVER_DEV_MODE=1``; without it, hardware and flags are what the configuration states.
"""

from __future__ import annotations

from typing import Any

import httpx

from dflash2_train.evaluate.server.connection import ServerError, address, call, get_object
from dflash2_train.evaluate.server.counters import CounterError, Counters, read_vllm
from dflash2_train.evaluate.server.messages import (
    Answer,
    Ask,
    Asking,
    BadAnswerError,
    RequestAcceptance,
    ServerFacts,
    checked_acceptance,
)

# Of the server's own configuration: what shapes speed or output. Nothing else is kept, keys least of all.
FLAGS = {
    "model_config": ("model", "revision", "dtype", "quantization", "max_model_len", "enforce_eager"),
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
    ),
    "speculative_config": ("method", "model", "num_speculative_tokens", "draft_sample_method"),
    "cache_config": ("cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "block_size"),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "async_scheduling"),
}


class VllmApi:
    """See :class:`dflash2_train.evaluate.server.messages.EngineApi`."""

    async def facts(self, client: httpx.AsyncClient, model: str) -> ServerFacts:
        """Raises ServerError if the model is not served or the server drafts another number than it counts."""
        served = await self._served(client, model)
        version = await get_object(client, "/version")
        info = await get_object(client, "/server_info?config_format=json") or {}
        counters = await self._read(client, str(served["id"]))
        context = served.get("max_model_len")
        return ServerFacts(
            engine="vllm",
            version=str(version["version"]) if version and "version" in version else None,
            model=str(served["id"]),
            context=context if isinstance(context, int) else None,
            num_drafted=len(counters.accepted_per_position) or None,
            prefix_caching=counters.prefix_caching,
            hardware=_hardware(info),
            flags=_flags(info) or ({"model": served["root"]} if served.get("root") else {}),
        )

    async def _served(self, client: httpx.AsyncClient, model: str) -> dict[str, Any]:
        body = await get_object(client, "/v1/models")
        entries = body.get("data") if body else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
            raise ServerError(f"{address(client, '/v1/models')}: no list of models. Check eval.server.url and engine.")
        served = {str(entry["id"]): entry for entry in entries}
        name = model or (next(iter(served)) if len(served) == 1 else "")
        if name not in served:
            raise ServerError(
                f"{address(client)}: serves {sorted(served)}, not eval.server.model={model!r}. Name one of them."
            )
        return served[name]

    async def counters(self, client: httpx.AsyncClient, model: str) -> Counters | None:
        """Raises CounterError if there are none; a vLLM without counters cannot be measured."""
        return await self._read(client, model)

    async def _read(self, client: httpx.AsyncClient, model: str) -> Counters:
        url = address(client)
        response = await call(client, "GET", "/metrics")
        if response is None:
            raise CounterError(
                f"{url}/metrics: there is no such page, so nothing can be measured. Address the server itself rather "
                "than a proxy, and check eval.server.engine."
            )
        return read_vllm(response.text, model, url)

    async def make_cold(self, client: httpx.AsyncClient) -> None:
        """Nothing to do: every request carries a salt of its own."""

    def request(self, ask: Ask, asking: Asking) -> tuple[str, dict[str, Any]]:
        """Completions for token ids, chat completions for messages."""
        body: dict[str, Any] = {
            "model": asking.model,
            "n": 1,
            "temperature": asking.temperature,
            "top_p": asking.top_p,
            "top_k": asking.top_k or -1,
            "min_p": asking.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": ask.max_new_tokens,
            "min_tokens": 0,
            "ignore_eos": False,
            "skip_special_tokens": False,
            "stream": False,
        }
        if ask.salt is not None:
            body["cache_salt"] = ask.salt
        if ask.prompt_ids is not None:
            return "/v1/completions", {**body, "prompt": ask.prompt_ids, "add_special_tokens": False}
        if asking.enable_thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": asking.enable_thinking}
        return "/v1/chat/completions", {**body, "messages": ask.messages}

    def answer(self, body: dict[str, Any]) -> Answer:
        """Text, tokens and counts of a completion."""
        try:
            (choice,) = body["choices"]
            usage = body["usage"]
            reason = choice["finish_reason"]
            prompt_tokens, output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            text = choice["text"] if "text" in choice else _spoken(choice["message"])
            details = usage.get("prompt_tokens_details") or {}
            spoken = (body.get("metrics") or {}).get("speculative_decoding")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadAnswerError("no answer in the response", f"{type(error).__name__}: {error}") from error
        if reason not in ("stop", "length"):
            raise BadAnswerError(f"finish_reason {reason!r}")
        return Answer(
            text=text or "",
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            finish_reason=reason,
            acceptance=None if spoken is None else _acceptance(spoken),
            cached_tokens=details.get("cached_tokens"),
        )


def _spoken(message: dict[str, Any]) -> str:
    """The content of a chat answer; its reasoning was split off by the server and templates drop it anyway."""
    return message.get("content") or ""


def _acceptance(spoken: dict[str, Any]) -> RequestAcceptance:
    try:
        return checked_acceptance(
            rounds=int(spoken["num_spec_steps"]),
            proposed=int(spoken["num_draft_tokens"]),
            accepted=int(spoken["num_accepted_draft_tokens"]),
            histogram=[int(count) for count in spoken["acceptance_histogram"]],
        )
    except (KeyError, TypeError) as error:
        raise BadAnswerError("another layout of metrics.speculative_decoding", repr(error)) from error


def _flags(info: dict[str, Any]) -> dict[str, Any]:
    """The kept part of the server's configuration; empty outside dev mode."""
    config = info.get("vllm_config")
    if not isinstance(config, dict):
        return {}
    return {
        section: {name: config[section][name] for name in names if config[section].get(name) is not None}
        for section, names in FLAGS.items()
        if isinstance(config.get(section), dict)
    }


def _hardware(info: dict[str, Any]) -> str | None:
    """The GPUs that the server's own environment report names, as in ``4x NVIDIA B300``."""
    listed = (info.get("system_env") or {}).get("nvidia_gpu_models")
    if not isinstance(listed, str) or not listed.strip():
        return None
    names = [line.split(": ", 1)[-1].strip() for line in listed.splitlines() if line.strip()]
    return ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
