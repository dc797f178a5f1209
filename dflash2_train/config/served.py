"""Measuring a running server: where it is, what is asked of it, and what a later run is held against."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash2_train.config.rules import require

ENGINES = ("vllm", "sglang")
METHODS = ("drafter", "mtp", "autoregressive")
TEMPLATES = ("client", "server")


@dataclass(kw_only=True)
class EvalTaskConfig:
    """Prompts of one task: a local JSONL or Parquet file, or a data set of the Hub.

    A row becomes one conversation. ``prompt`` is a template over the row's columns, as in ``$question`` (``$$`` is a
    dollar sign); ``turns_column`` names a list of user turns, each asked with the answers before it.
    """

    name: str = MISSING  # in tables and plots
    path: str = MISSING  # file, or Hub id
    subset: str | None = None  # Hub: configuration name
    split: str = "test"  # Hub: split name
    revision: str | None = None  # Hub: pinned commit; None reads the newest one
    prompt: str = ""  # template of the one user turn; empty: columns messages, prompt or turns_column are read
    turns_column: str = ""  # list of user turns, as text or as {role, content}
    category_column: str = ""  # categories are measured one after another, each with counters of its own
    max_prompts: int | None = None  # the first ones; None = eval.max_prompts

    def check(self, key: str) -> None:
        """Raise ConfigError for the first field that cannot be right."""
        require(self.name != "", f"{key}.name", self.name, "must not be empty", "Name the task.")
        require(self.path != "", f"{key}.path", self.path, "must not be empty", "Name a file or a Hub id.")
        require(
            not (self.prompt and self.turns_column),
            f"{key}.prompt",
            self.prompt,
            "excludes turns_column",
            "Keep one of the two.",
        )
        require(
            self.max_prompts is None or self.max_prompts > 0,
            f"{key}.max_prompts",
            self.max_prompts,
            "must be positive",
            "Leave it null for all rows.",
        )


@dataclass(kw_only=True)
class EvalServerConfig:
    """``eval.mode=server``: one server, started by the user, measured from here."""

    url: str = ""  # as in http://127.0.0.1:8000
    engine: str = "vllm"  # vllm | sglang
    model: str = ""  # served name; empty: the only one the server lists
    method: str = "drafter"  # drafter | mtp | autoregressive: what the server was started with
    label: str = ""  # of this run in tables and its folder's name; empty: the method
    concurrency: list[int] = field(default_factory=lambda: [16])  # requests in flight; every task at each of them
    template: str = "client"  # client: rendered with the target's tokenizer and sent as ids; server: sent as messages
    hardware: str = ""  # what the server runs on, as in 4x B300; read from the server where it tells
    flags: str = ""  # how the server was started; read from the server where it tells
    api_key_env: str | None = None  # name of the environment variable that holds the key
    warm_up: int = 0  # requests before each measurement, at its concurrency; 0 = as many as the concurrency
    warm_up_tokens: int = 32  # answer tokens of each of them
    cold_prefix_cache: bool = True  # no request finds another one's prompt in the prefix cache
    timeout_s: float = 1800.0  # of one request
    connect_timeout_s: float = 10.0  # until the server takes the connection
    tries: int = 1  # of one request; every further try is counted and shown
    backoff_s: float = 1.0  # before a further try, doubled each time
    max_failed_share: float = 0.0  # of the requests of a measurement; more fails the command
    settle_s: float = 0.25  # between two readings of the counters that must agree

    @property
    def resolved_label(self) -> str:
        """``label`` with its default written out."""
        return self.label or self.method

    def check(self) -> None:
        """Raise ConfigError for the first rule that the values break."""
        for key, allowed in (("engine", ENGINES), ("method", METHODS), ("template", TEMPLATES)):
            value = vars(self)[key]
            require(value in allowed, f"eval.server.{key}", value, f"must be one of {allowed}", "Pick one.")
        require(
            self.url.startswith(("http://", "https://")),
            "eval.server.url",
            self.url,
            "must be the address of a running server",
            "Set it, as in eval.server.url=http://127.0.0.1:8000",
        )
        require(
            "@" not in self.url,
            "eval.server.url",
            "(not shown)",
            "must not carry a password: addresses are written into records",
            "Use eval.server.api_key_env.",
        )
        require(
            self.engine != "sglang" or self.template == "client",
            "eval.server.template",
            self.template,
            "SGLang tells a request's acceptance on /generate, which takes token ids",
            "Use client.",
        )
        require(
            len(set(self.concurrency)) == len(self.concurrency) > 0 and min(self.concurrency) > 0,
            "eval.server.concurrency",
            self.concurrency,
            "must be a list of different positive numbers",
            "Use [16].",
        )
        require(
            "/" not in self.resolved_label and not self.resolved_label.startswith("."),
            "eval.server.label",
            self.label,
            "names a folder",
            "Leave out slashes and a leading dot.",
        )
        require(
            0.0 <= self.max_failed_share < 1.0,
            "eval.server.max_failed_share",
            self.max_failed_share,
            "must lie in [0, 1)",
            "Use 0.",
        )
        for key in ("timeout_s", "connect_timeout_s", "backoff_s", "settle_s", "tries", "warm_up_tokens"):
            value = vars(self)[key]
            require(value > 0, f"eval.server.{key}", value, "must be positive", "Use the default.")
        require(self.warm_up >= 0, "eval.server.warm_up", self.warm_up, "must not be negative", "Use 0.")


@dataclass(kw_only=True)
class GateConfig:
    """Fails an evaluation whose acceptance length lies below that of a named one by more than the noise."""

    baseline: str | None = None  # report.json of the run to hold against; None = no gate
    tolerance: float = 0.0  # tokens of acceptance length allowed beyond the noise
    confidence: float = 0.95  # of the noise band
    allow_unlike: bool = False  # compare though hardware, prompts, limits or K differ; the verdict says so
    after_training: bool = False  # dflash2-train evaluates its export and ends with the gate's exit code

    def check(self) -> None:
        """Raise ConfigError for the first rule that the values break."""
        require(self.tolerance >= 0, "eval.gate.tolerance", self.tolerance, "must not be negative", "Use 0.")
        require(
            0.5 <= self.confidence < 1.0,
            "eval.gate.confidence",
            self.confidence,
            "must lie in [0.5, 1)",
            "Use 0.95.",
        )
        require(
            self.baseline is not None or not self.after_training,
            "eval.gate.baseline",
            self.baseline,
            "eval.gate.after_training needs a run to hold against",
            "Name its report.json.",
        )
