"""A Hugging Face Hub in miniature: repositories, branches, commits, LFS uploads, downloads with ranges, and faults.

It speaks as much of the protocol as huggingface_hub 2.4 needs without Xet, keeps everything in memory, and counts the
requests. A fault is a method, a pattern of the path, and a list of what happens to the next requests that match: a
status, an ``Answer`` with an error code, or CUT, which closes the connection half-way.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

CUT = "cut"
LFS_SUFFIXES = (".safetensors", ".pt", ".bin", ".gguf")
TOKEN = "hf_" + "StubHubToken0123456789"


@dataclass(frozen=True)
class Answer:
    """An error as the Hub gives it."""

    status: int
    code: str = ""
    message: str = "no"


@dataclass
class Blob:
    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_id(self) -> str:
        content = f"oid sha256:{self.sha256}".encode() if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        lfs = {"oid": self.sha256, "size": len(self.content), "pointerSize": 127}
        entry = {"type": "file", "path": path, "size": len(self.content), "oid": self.git_id}
        return {**entry, "lfs": lfs} if self.lfs else entry


@dataclass
class Repository:
    private: bool
    gated: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        content = [(name, blob.sha256) for name, blob in sorted(files.items())]
        sha = hashlib.sha1(f"{branch}{len(self.commits)}{message}{content}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def files(self, revision: str) -> dict[str, Blob] | None:
        return self.commits.get(self.branches.get(revision, revision))

    def sha(self, revision: str) -> str:
        return self.branches.get(revision, revision)


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms behind its headers
    hub: ClassVar[StubHub]

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def handle_any(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        hub.tokens.append(self.headers.get("Authorization"))
        fault = hub.next_fault(self.command, path)
        body = self.read_body(half=fault == CUT and self.command != "GET")
        if body is None:
            self.close_connection = True
            self.connection.close()
            return
        if isinstance(fault, int):
            fault = Answer(fault)
        reply = fault if isinstance(fault, Answer) else hub.answer(self.command, path, self.query(), body, self.headers)
        self.send(reply, cut=fault == CUT)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query)

    def read_body(self, *, half: bool) -> bytes | None:
        """The request's body; None when it was cut."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return None if half else b"".join(parts)
        length = int(self.headers.get("Content-Length", 0))
        content = self.rfile.read(length // 2 if half else length)
        return None if half else content

    def send(self, reply: Any, *, cut: bool) -> None:
        headers: dict[str, str] = {}
        if isinstance(reply, Answer):
            status, content = reply.status, json.dumps({"error": reply.message}).encode()
            if reply.code:
                headers["X-Error-Code"] = reply.code
            headers["X-Error-Message"] = reply.message
        elif isinstance(reply, tuple):
            status, content, headers = reply
        else:
            status, content = 200, json.dumps(reply).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True


class StubHub:
    """The server; use as a context manager. ``endpoint`` is its address."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # by sha256
        self.faults: list[tuple[str, re.Pattern[str], list[Any]]] = []
        self.requests: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.users = {f"Bearer {TOKEN}"}
        handler = type("Handler", (HubHandler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> StubHub:
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, method: str, pattern: str, *happenings: Any) -> None:
        self.faults.append((method, re.compile(pattern), list(happenings)))

    def next_fault(self, method: str, path: str) -> Any:
        for wanted, pattern, happenings in self.faults:
            if wanted == method and pattern.search(path) and happenings:
                return happenings.pop(0)
        return None

    def count(self, method: str, pattern: str) -> int:
        return sum(one == method and re.search(pattern, path) is not None for one, path in self.requests)

    def add(self, repo_id: str, files: dict[str, bytes], *, private: bool = True, gated: bool = False) -> Repository:
        repository = Repository(private=private, gated=gated)
        blobs = {name: Blob(content, name.endswith(LFS_SUFFIXES)) for name, content in files.items()}
        repository.commit("main", blobs, "first")
        self.repositories[repo_id] = repository
        return repository

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes, headers: Any) -> Any:
        signed_in = headers.get("Authorization") in self.users
        if path == "/api/repos/create":
            return self.create(json.loads(body)) if signed_in else Answer(401)
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.startswith("/storage/"):
            return self.store(path, body)
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.batch(json.loads(body)) if signed_in else Answer(401)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.allowed(match[1], signed_in) or self.resolve(*match.groups(), headers)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([a-z-]+))?(?:/(.+))?", path):
            repo_id, what, rest = match.groups()
            return self.allowed(repo_id, signed_in) or self.api(repo_id, what, rest or "main", body)
        return Answer(404, "EntryNotFound", f"nothing at {method} {path}")

    def allowed(self, repo_id: str, signed_in: bool) -> Answer | None:
        repository = self.repositories.get(repo_id)
        if repository is None:
            return Answer(404 if signed_in else 401, "RepoNotFound", "Repository not found")
        if repository.private and not signed_in:
            return Answer(401, "RepoNotFound", "Repository not found")
        return Answer(403, "GatedRepo", "Access to it is restricted") if repository.gated else None

    def create(self, wanted: dict[str, Any]) -> Any:
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        if repo_id in self.repositories:
            return Answer(409, message="You already created this model repo")
        self.add(repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=wanted["visibility"] == "private")
        return {"url": f"{self.endpoint}/{repo_id}"}

    def api(self, repo_id: str, what: str | None, rest: str, body: bytes) -> Any:
        repository = self.repositories[repo_id]
        if what == "branch":
            if rest in repository.branches:
                return Answer(409, message="Reference already exists")
            repository.branches[rest] = repository.branches["main"]
            return {}
        files = repository.files(rest.split("/")[0])
        if files is None:
            return Answer(404, "RevisionNotFound", "Invalid rev id")
        if what in (None, "revision"):
            return {"id": repo_id, "sha": repository.sha(rest), "private": repository.private, "siblings": []}
        if what == "tree":
            return [blob.entry(name) for name, blob in sorted(files.items())]
        if what == "paths-info":
            paths = parse_qs(body.decode())["paths"]
            return [files[path].entry(path) for path in paths if path in files]
        if what == "preupload":
            return {"files": [self.mode(one["path"], files) for one in json.loads(body)["files"]]}
        assert what == "commit", what
        return self.commit(repo_id, repository, rest, body)

    def mode(self, path: str, files: dict[str, Blob]) -> dict[str, Any]:
        lfs = path.endswith(LFS_SUFFIXES)
        blob = files.get(path)
        oid = None if blob is None else blob.sha256 if lfs else blob.git_id
        return {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    def batch(self, wanted: dict[str, Any]) -> Any:
        objects = []
        for one in wanted["objects"]:
            entry: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.objects:
                href = f"{self.endpoint}/storage/{one['oid']}?X-Amz-Signature=secretsignature"
                entry["actions"] = {"upload": {"href": href}}
            objects.append(entry)
        return {"transfer": "basic", "objects": objects}

    def store(self, path: str, body: bytes) -> Any:
        oid = path.removeprefix("/storage/")
        if hashlib.sha256(body).hexdigest() != oid:
            return Answer(400, message="the content is not that of the oid")
        self.objects[oid] = body
        return {}

    def commit(self, repo_id: str, repository: Repository, branch: str, body: bytes) -> Any:
        files, message = dict(repository.files(branch) or {}), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = f"{value['summary']}\n\n{value['description']}"
            elif item["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif item["key"] == "lfsFile":
                files[value["path"]] = Blob(self.objects[value["oid"]], lfs=True)
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(branch, files, message)
        return {"commitUrl": f"{self.endpoint}/{repo_id}/commit/{sha}", "commitOid": sha}

    def resolve(self, repo_id: str, revision: str, name: str, headers: Any) -> Any:
        repository = self.repositories[repo_id]
        files = repository.files(revision)
        if files is None:
            return Answer(404, "RevisionNotFound", "Invalid rev id")
        if name not in files:
            return Answer(404, "EntryNotFound", "Entry not found")
        blob = files[name]
        etag = blob.sha256 if blob.lfs else blob.git_id
        told = {"X-Repo-Commit": repository.sha(revision), "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        wanted = headers.get("Range")
        if wanted is None:
            return 200, blob.content, told
        start = int(re.fullmatch(r"bytes=(\d+)-.*", wanted)[1])  # type: ignore[index]
        span = f"bytes {start}-{len(blob.content) - 1}/{len(blob.content)}"
        return 206, blob.content[start:], {**told, "Content-Range": span}
