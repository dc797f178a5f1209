"""The Hub client as this project uses it: bounded waits, a few retries, faults in words, and no secret in any of them.

The token comes from ``hf auth login`` or HF_TOKEN through huggingface_hub, never from an option, which would leave it
in the shell's history. It is not written anywhere, and :func:`redacted` takes it, anything that looks like one, and the
signed part of storage URLs out of every text that leaves here, log lines of the library included.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn, TypeVar

from dflash2_train.config import UserError
from dflash2_train.export.payload import TOOL

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)
T = TypeVar("T")
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_BEARER = re.compile(r"(?i)(bearer\s+)[^\s'\"]+")
_SIGNED = re.compile(r"(https?://[^\s?'\"]+\?)[^\s'\"]+")
TIMEOUTS = (20.0, 300.0, 300.0, 20.0)  # seconds to connect, read, write, get a connection; the library waits for ever
WAITS = (2.0, 8.0, 30.0)  # seconds before each further try, on top of the library's own
TRANSIENT = (408, 429, 500, 502, 503, 504)
MAX_CAUSES = 10


class HubError(UserError):
    """The Hub could not do what was asked; the text says why and what to do."""


def redacted(text: str, token: str | None) -> str:
    """``text`` without the token, without anything of a token's form, and without the query of URLs."""
    if token:
        text = text.replace(token, "…")
    text = TOKEN.sub("hf_…", text)
    text = _BEARER.sub(r"\1…", text)
    return _SIGNED.sub(r"\1…", text)


class _Redactor(logging.Filter):
    def __init__(self, token: str | None) -> None:
        super().__init__()
        self.token = token

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redacted(record.getMessage(), self.token), None
        return True


@contextmanager
def redacted_logs(token: str | None) -> Iterator[None]:
    """Nothing secret in what is logged meanwhile: the library's warnings name storage URLs as they are."""
    loggers = (logging.getLogger(), logging.getLogger("huggingface_hub"))
    handlers = [handler for one in loggers for handler in one.handlers]
    redactor = _Redactor(token)
    for handler in handlers:
        handler.addFilter(redactor)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(redactor)


def find_token(*, required: bool) -> str | None:
    """The user's token, from HF_TOKEN or from ``hf auth login``.

    Raises:
        HubError: there is none and one is required.
    """
    from huggingface_hub import get_token

    token = get_token()
    if token is None and required:
        raise HubError("no Hub token: pushing needs one that may write. Run hf auth login, or set HF_TOKEN.")
    return token


def open_api(endpoint: str | None, token: str | None) -> HfApi:
    """A client of the Hub at ``endpoint`` (None: the usual one, or HF_ENDPOINT); without a token it sends none."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint, token=token or False, library_name=TOOL, library_version=version(TOOL))


class HubCaller:
    """Calls to one repository: tried again after a passing fault, told in words after any other.

    Args:
        endpoint: of the Hub, for messages.
        repo_id: the repository.
        token: to be kept out of messages.
    """

    def __init__(self, endpoint: str, repo_id: str, token: str | None) -> None:
        self.endpoint, self.repo_id, self.token = endpoint, repo_id, token

    def __call__(self, what: str, action: Callable[[], T]) -> T:
        """The result of ``action``, which may run several times and so must be safe to repeat.

        Args:
            what: of the action, as in "upload" (names it in messages).
            action: one or more requests.

        Raises:
            HubError: see :meth:`refuse`.
        """
        from huggingface_hub import get_session
        from huggingface_hub.errors import HTTPError

        for wait in (*WAITS, None):
            get_session().timeout = TIMEOUTS
            try:
                with redacted_logs(self.token):
                    return action()
            # HTTPError is the transport library's; the Hub's own are OSErrors, bad names and answers ValueErrors, and
            # uploads wrap any of these in a RuntimeError, which is also what Xet storage raises.
            except (HTTPError, OSError, ValueError, RuntimeError) as error:
                fault = root_fault(error)
                if wait is None or not is_transient(fault):
                    self.refuse(what, fault)
                reason = redacted(str(fault).splitlines()[0] if str(fault) else repr(fault), self.token)
                logger.warning("%s: %s; tried again in %.0f s", what, reason, wait)
                time.sleep(wait)
        raise AssertionError("the last try returns or refuses")

    def refuse(self, what: str, fault: BaseException) -> NoReturn:
        """Raise HubError for a fault that will not pass by itself."""
        status, code, message = answer_of(fault)
        where = f"{what} {self.repo_id}"
        if status is not None:
            text = self._answer(status, code, message)
        elif is_connection_fault(fault):
            text = (
                f"no connection to {self.endpoint} ({type(fault).__name__}). Try again later; the same command goes on."
            )
        else:
            text = f"{fault or repr(fault)}"
        raise HubError(redacted(f"{where}: {text}", self.token)) from None

    def _answer(self, status: int, code: str, message: str) -> str:
        """What an answer means for the user."""
        page = f"{self.endpoint}/{self.repo_id}"
        signed_in = "the token in use" if self.token else "no token (hf auth login, or HF_TOKEN)"
        if code == "GatedRepo":
            return f"is gated: open {page}, accept its terms, and sign in as the same user. Sent was {signed_in}."
        if code == "RevisionNotFound":
            return "has no such revision. Name a branch, a tag or a commit that its page lists."
        if code == "EntryNotFound":
            return "lacks a file that was asked for, so it is no drafter that this command can take."
        known = {
            401: f"not allowed (401) with {signed_in}. Sign in with hf auth login; a private one looks the same.",
            403: f"not allowed (403) with {signed_in}. Use a token that may write there, or another repository.",
            404: f"no such repository, or a private one that this user may not see. Sent was {signed_in}.",
            429: "the Hub asks to slow down (429). Wait some minutes; the same command goes on where it stopped.",
        }
        later = " The same command goes on where it stopped." if status >= 500 else ""
        said = f' The Hub says: "{message}".' if message else ""
        return known.get(status, f"the Hub answered {status}.{later}") + said


def root_fault(error: BaseException) -> BaseException:
    """The fault behind an error: an answer of the server or a lost connection among its causes, else itself."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            break
        if status_of(cause) is not None or is_connection_fault(cause):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def answer_of(fault: BaseException) -> tuple[int | None, str, str]:
    """HTTP status, error code and message of an answer of the Hub; no status and empty texts for any other fault."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(fault, HfHubHTTPError):
        return None, "", ""
    headers = fault.response.headers
    return fault.response.status_code, headers.get("X-Error-Code", ""), headers.get("X-Error-Message", "")


def status_of(fault: BaseException) -> int | None:
    """HTTP status of an answer of the Hub; None for any other fault."""
    return answer_of(fault)[0]


def is_connection_fault(fault: BaseException) -> bool:
    """Whether nothing answered, or the line was cut."""
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    if isinstance(fault, OfflineModeIsEnabled) or status_of(fault) is not None:
        return False
    return isinstance(fault, HTTPError | ConnectionError | TimeoutError)


def is_transient(fault: BaseException) -> bool:
    """Whether the same request may well succeed a little later."""
    return status_of(fault) in TRANSIENT or is_connection_fault(fault)
