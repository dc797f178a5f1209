"""An OpenAI-compatible server of the target in miniature, which can die, hang, answer garbage, and come back."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from tests.toy_target import END

MODEL = "toy"


class Gone(Exception):
    """Close the connection without a word."""


def answer_of(body: dict[str, Any]) -> dict[str, Any]:
    """A good response; the answer depends on the prompt and the seed alone."""
    ids = [7 + (sum(body["prompt"]) + body["seed"]) % 80, 8, END]
    choice = {
        "index": 0,
        "text": "not what is kept",
        "finish_reason": "stop",
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
    }
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


Reply = tuple[int, bytes]  # status, body
Behaviour = Callable[[dict[str, Any]], Reply]


def good(body: dict[str, Any]) -> Reply:
    return 200, json.dumps(answer_of(body)).encode()


def garbage(_body: dict[str, Any]) -> Reply:
    return 200, b"\x00\xff<html>not json"


def broken(_body: dict[str, Any]) -> Reply:
    return 500, b"internal error"


def hanging(body: dict[str, Any]) -> Reply:
    time.sleep(4.0)
    return good(body)


def vanishing(_body: dict[str, Any]) -> Reply:
    raise Gone


@dataclass
class StubServer:
    """One server on localhost; ``behaviour`` may be changed at any time, ``stop`` and ``start`` keep the port."""

    behaviour: Behaviour = good
    model: str = MODEL
    max_model_len: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answered: Counter[tuple[int, ...]] = field(default_factory=Counter)  # prompt -> good responses sent
    most_busy: int = 0
    port: int = 0
    _busy: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> StubServer:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version: ClassVar[str] = "HTTP/1.1"
            disable_nagle_algorithm = True  # or a body waits 40 ms behind its headers

            def do_GET(self) -> None:
                entry = {"id": stub.model, "object": "model", "max_model_len": stub.max_model_len}
                self._send(200, json.dumps({"object": "list", "data": [entry]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub._lock:
                    stub.bodies.append(body)
                    stub._busy += 1
                    stub.most_busy = max(stub.most_busy, stub._busy)
                try:
                    try:
                        status, reply = stub.behaviour(body)
                    finally:
                        with stub._lock:  # before the client can know and send the next one
                            stub._busy -= 1
                    self._send(status, reply)
                except (Gone, ConnectionError):
                    self.close_connection = True

            def _send(self, status: int, reply: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False  # a handler may hang on purpose

            def handle_error(self, *_: object) -> None:
                """A client that went away is no news here."""

            def get_request(self) -> Any:
                connection, address = super().get_request()
                stub._connections.append(connection)
                return connection, address

        self._connections: list[Any] = []
        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def stop(self) -> None:
        """Die: no new connections, the open ones are cut."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            try:
                connection.shutdown(2)
            except OSError:
                continue  # closed by the other side already
