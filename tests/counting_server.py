"""A speculating server in miniature, vLLM's or SGLang's outside, with counters that add up since its start.

What a prompt's rounds accept follows from its tokens alone, so every figure can be worked out by hand.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

MODEL = "toy"
Reply = tuple[int, bytes]
Fault = Callable[[int, dict[str, Any]], Reply | None]  # number of the request, body -> another reply than the good one


def accepted_of(prompt: list[int], num_drafted: int) -> list[int]:
    """Accepted drafts of each round that answers ``prompt``."""
    return [(sum(prompt) + place) % (num_drafted + 1) for place in range(2 + len(prompt) % 3)]


def no_fault(_number: int, _body: dict[str, Any]) -> None:
    return None


@dataclass
class CountingServer:
    """One server on localhost. Everything may be changed while it runs."""

    num_drafted: int | None = 3  # None = started without speculation
    has_metrics: bool = True
    tells_requests: bool = False  # answers carry their own counts
    start_time: float | None = 1000.0
    max_model_len: int = 64
    prefix_caching: bool = False
    fault: Fault = no_fault
    delay_s: float = 0.0
    lag_s: float = 0.0  # from an answer to its counting
    running: int = 0  # requests of others, as /metrics shows them
    histogram: Callable[[list[int]], list[int]] = list  # spoils SGLang's histograms
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_busy: int = 0
    rounds: int = 5000  # of an earlier life: nothing of it may show
    proposed: int = 15000
    accepted: int = 14000
    positions: list[int] = field(default_factory=lambda: [4900, 4700, 4400])
    output_tokens: int = 20000
    finished: int = 700
    prefix_queries: int = 9000
    prefix_hits: int = 8000
    _busy: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> CountingServer:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version: ClassVar[str] = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each reply waits for an acknowledgement of its headers, 40 ms

            def do_GET(self) -> None:
                self._send(*stub.page(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
                self._send(*stub.post(self.path, body, dict(self.headers)))

            def _send(self, status: int, reply: bytes) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(reply)))
                    self.end_headers()
                    self.wfile.write(reply)
                except ConnectionError:
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: object) -> None:
                """A client that went away is no news here."""

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def restart(self) -> None:
        """Another life: counters at zero."""
        with self._lock:
            self.rounds = self.proposed = self.accepted = self.output_tokens = self.finished = 0
            self.prefix_queries = self.prefix_hits = 0
            self.positions = [0] * len(self.positions)
            self.start_time = None if self.start_time is None else self.start_time + 60

    def page(self, path: str) -> Reply:
        """GET."""
        if path == "/v1/models":
            entry = {"id": MODEL, "object": "model", "max_model_len": self.max_model_len, "root": "models/toy"}
            return 200, json.dumps({"object": "list", "data": [entry]}).encode()
        if path == "/version":
            return 200, b'{"version": "9.9.9"}'
        if path == "/metrics" and self.has_metrics:
            return 200, self.metrics().encode()
        return 404, b"not found"

    def metrics(self) -> str:
        """The counters as vLLM shows them."""
        label = f'engine="0",model_name="{MODEL}"'
        lines = [
            "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
            "# TYPE vllm:generation_tokens_total counter",
            f"vllm:generation_tokens_total{{{label}}} {float(self.output_tokens)}",
            'vllm:generation_tokens_total{engine="0",model_name="another"} 77.0',
            f'vllm:request_success_total{{{label},finished_reason="stop"}} {float(self.finished)}',
            f"vllm:num_requests_running{{{label}}} {float(self.running)}",
            f"vllm:num_requests_waiting{{{label}}} 0.0",
            f"vllm:prefix_cache_queries_total{{{label}}} {float(self.prefix_queries)}",
            f"vllm:prefix_cache_hits_total{{{label}}} {float(self.prefix_hits)}",
            f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{self.prefix_caching}",engine="0"}} 1.0',
        ]
        if self.start_time is not None:
            lines.append(f"process_start_time_seconds {self.start_time}")
        if self.num_drafted is not None:
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{label}}} {float(self.rounds)}",
                f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {float(self.proposed)}",
                f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {float(self.accepted)}",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{place}"}} {float(count)}'
                    for place, count in enumerate(self.positions)
                ),
            ]
        return "\n".join(lines) + "\n"

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        """POST: a request, taken apart by what it asks for."""
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.paths.append(path)
            self.headers.append(headers)
            self._busy += 1
            self.most_busy = max(self.most_busy, self._busy)
        try:
            time.sleep(self.delay_s)
            spoiled = self.fault(number, body)
            return spoiled if spoiled is not None else self._answer(path, body)
        finally:
            with self._lock:
                self._busy -= 1

    def _answer(self, path: str, body: dict[str, Any]) -> Reply:
        prompt = body["prompt"] if "prompt" in body else [len(turn["content"]) for turn in body["messages"]]
        rounds = [] if self.num_drafted is None else accepted_of(prompt, self.num_drafted)
        tokens = 1 + (4 if self.num_drafted is None else sum(rounds) + len(rounds))
        if self.lag_s:
            threading.Timer(self.lag_s, self._count, (prompt, rounds, tokens)).start()
        else:
            self._count(prompt, rounds, tokens)
        text = f"answer to {sum(prompt)}"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"text": text} if path == "/v1/completions" else {"message": {"role": "assistant", "content": text}}
        reply: dict[str, Any] = {
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": tokens},
        }
        if self.tells_requests and self.num_drafted is not None:
            reply["metrics"] = {"speculative_decoding": self._told(rounds, self.num_drafted)}
        return 200, json.dumps(reply).encode()

    def _count(self, prompt: list[int], rounds: list[int], tokens: int) -> None:
        with self._lock:
            self._add(prompt, rounds, tokens)

    def _add(self, prompt: list[int], rounds: list[int], tokens: int) -> None:
        self.rounds += len(rounds)
        self.proposed += len(rounds) * (self.num_drafted or 0)
        self.accepted += sum(rounds)
        self.positions = [count + sum(one > place for one in rounds) for place, count in enumerate(self.positions)]
        self.output_tokens += tokens
        self.finished += 1
        self.prefix_queries += len(prompt)

    @staticmethod
    def _told(rounds: list[int], num_drafted: int) -> dict[str, Any]:
        return {
            "mean_acceptance_length": 1 + sum(rounds) / len(rounds),
            "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [rounds.count(m) for m in range(num_drafted + 1)],
            "num_spec_steps": len(rounds),
            "num_accepted_draft_tokens": sum(rounds),
            "num_draft_tokens": len(rounds) * num_drafted,
            "num_spec_tokens": num_drafted,
        }


class CountingSglang(CountingServer):
    """The same with SGLang's outside: counts in ``meta_info``, no counter of accepted tokens."""

    def page(self, path: str) -> Reply:
        if path == "/server_info":
            info = {
                "model_path": "models/toy",
                "served_model_name": MODEL,
                "version": "0.5.0",
                "context_length": self.max_model_len,
                "disable_radix_cache": not self.prefix_caching,
                "api_key": "do-not-keep-me",
                "speculative_algorithm": None if self.num_drafted is None else "DFLASH",
                "speculative_num_draft_tokens": None if self.num_drafted is None else self.num_drafted + 1,
                "internal_states": [{"avg_spec_accept_length": 3.9}],
            }
            return 200, json.dumps(info).encode()
        if path == "/metrics" and self.has_metrics:
            lines = [
                f'sglang:generation_tokens_total{{model_name="{MODEL}"}} {float(self.output_tokens)}',
                f'sglang:num_requests_total{{model_name="{MODEL}"}} {float(self.finished)}',
                f'sglang:spec_verify_calls_total{{model_name="{MODEL}"}} {float(self.rounds)}',
                f'sglang:num_running_reqs{{model_name="{MODEL}"}} 0.0',
            ]
            return 200, "\n".join(lines).encode()
        return 404, b"not found"

    def _answer(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/flush_cache":
            return 200, b"Cache flushed."
        prompt = body["input_ids"]
        rounds = [] if self.num_drafted is None else accepted_of(prompt, self.num_drafted)
        tokens = 1 + sum(rounds) + len(rounds)
        self._count(prompt, rounds, tokens)
        meta: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": tokens},
        }
        if rounds:
            meta |= {
                "spec_verify_ct": len(rounds),
                "spec_accept_token_num": sum(rounds),
                "spec_draft_token_num": len(rounds) * (self.num_drafted or 0),
                "spec_accept_histogram": self.histogram([rounds.count(m) for m in range(max(rounds) + 1)]),
            }
        return 200, json.dumps({"text": "an answer", "output_ids": [1] * tokens, "meta_info": meta}).encode()
