"""Errors a user can mend, and the check that all rules of the schema go through."""

from __future__ import annotations

from pathlib import Path

DTYPES = ("bfloat16", "float32")


class UserError(Exception):
    """A fault that the user can mend. The text names key or file, value, rule and next step; no traceback is shown."""

    exit_code = 2  # of the command that it ends


class ConfigError(UserError, ValueError):
    """A configuration that cannot be run."""


def require(condition: bool, key: str, value: object, rule: str, next_step: str) -> None:
    """Raise :class:`ConfigError`, which says all of it in one line, unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{key}={value!r}: {rule}. {next_step}")


def absolute(path: str) -> Path:
    """A configured path as an absolute one, relative to where the command was started."""
    return Path(path).expanduser().resolve()
