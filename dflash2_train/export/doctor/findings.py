"""What a check is, what it finds, and the registries that checks enter themselves into."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from dflash2_train.config import UserError

logger = logging.getLogger(__name__)
ERROR = "error"  # some reader refuses the drafter, or drafts worse than it was trained to
WARNING = "warning"  # right only if it was meant so, or a limit that some user will meet

VLLM = "vLLM"
SGLANG = "SGLang"
LLAMA_CPP = "llama.cpp"
REFERENCE = "reference"  # the method's own PyTorch implementation (PyPI dflash)
RUNNER = "runner"  # dflash2-train's own, behind dflash2-eval
SERVERS = (VLLM, SGLANG, LLAMA_CPP)
READERS = (*SERVERS, REFERENCE, RUNNER)

Subject = TypeVar("Subject")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One broken rule."""

    check: str  # id of the check
    severity: str  # ERROR or WARNING
    message: str  # key, file or tensor, and its value
    rule: str
    servers: tuple[str, ...]  # the readers that it touches
    next_step: str

    def __str__(self) -> str:
        return f"{self.severity} [{self.check}] {self.message}. {self.next_step}"


@dataclass(frozen=True, kw_only=True)
class Check(Generic[Subject]):
    """A rule and the function that tells, one message a breach, where ``Subject`` breaks it."""

    id: str
    group: str
    severity: str
    rule: str
    servers: tuple[str, ...]
    next_step: str
    breaches: Callable[[Subject], Iterable[str]]

    def __call__(self, subject: Subject) -> Iterator[Finding]:
        for message in self.breaches(subject):
            yield Finding(
                check=self.id,
                severity=self.severity,
                message=message,
                rule=self.rule,
                servers=self.servers,
                next_step=self.next_step,
            )


class Registry(Generic[Subject]):
    """Checks of one kind of subject by id, in the order in which they were written."""

    def __init__(self) -> None:
        self.checks: dict[str, Check[Subject]] = {}

    def check(
        self,
        id: str,
        *,
        group: str,
        rule: str,
        servers: tuple[str, ...],
        next_step: str,
        severity: str = ERROR,
    ) -> Callable[[Callable[[Subject], Iterable[str]]], Callable[[Subject], Iterable[str]]]:
        """Enter the decorated function under ``id``; it yields a message for each breach of ``rule``."""

        def enter(breaches: Callable[[Subject], Iterable[str]]) -> Callable[[Subject], Iterable[str]]:
            assert id not in self.checks, f"two checks are called {id}"
            self.checks[id] = Check(
                id=id,
                group=group,
                severity=severity,
                rule=rule,
                servers=servers,
                next_step=next_step,
                breaches=breaches,
            )
            return breaches

        return enter

    def group_of(self, id: str) -> str | None:
        """The group of the check ``id``; None if there is no such check here."""
        return self.checks[id].group if id in self.checks else None

    def run(self, subject: Subject, group: str) -> list[Finding]:
        """The findings of all checks in ``group``."""
        checks = [check for check in self.checks.values() if check.group == group]
        return [finding for check in checks for finding in check(subject)]


@dataclass(frozen=True, kw_only=True)
class Examination(Generic[Subject]):
    """What the doctor saw of one drafter.

    Attributes:
        subject: the opened drafter; None where it has no readable configuration.
        findings: errors first.
        not_checked: what could not be looked at, and what would be needed for it.
    """

    subject: Subject | None
    findings: list[Finding]
    not_checked: list[str]

    @property
    def errors(self) -> int:
        """Number of errors."""
        return sum(finding.severity == ERROR for finding in self.findings)

    @property
    def warnings(self) -> int:
        """Number of warnings."""
        return len(self.findings) - self.errors

    def adding(self, finding: Finding | None) -> Examination[Subject]:
        """The same with one more finding, or as it is for None."""
        return self if finding is None else replace(self, findings=errors_first([*self.findings, finding]))


def errors_first(findings: list[Finding]) -> list[Finding]:
    """Errors before warnings, each in the order of the checks."""
    return sorted(findings, key=lambda finding: finding.severity != ERROR)


def refuse_errors(findings: Iterable[Finding], refusal: str, raises: type[UserError] = UserError) -> None:
    """Log the warnings among ``findings``, and raise ``raises`` for its errors, listed under the line ``refusal``."""
    errors = []
    for finding in findings:
        if finding.severity == ERROR:
            errors.append(str(finding))
        else:
            logger.warning("%s", finding)
    if errors:
        listed = "\n  ".join(errors)
        raise raises(f"{refusal}:\n  {listed}")
