"""What is measured, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash2_train.config.drafter import DrafterConfig
from dflash2_train.config.rules import DTYPES, require
from dflash2_train.config.served import EvalServerConfig, EvalTaskConfig, GateConfig
from dflash2_train.config.sweep import EvalSweepConfig

MODES = ("runner", "server")
SERVER_SWEEP = "Start a server with each K and measure each under a label of its own."


@dataclass(kw_only=True)
class EvalConfig:
    """A measurement with the built-in runner, or of a running server."""

    output_dir: str = MISSING  # folder of results, reports and plots
    mode: str = "runner"  # runner: built in; server: eval.server.url
    drafter: str | None = None  # exported folder; None = export.output_dir
    max_new_tokens: int = MISSING  # answer tokens a prompt, at most
    max_prompts: int | None = None  # of the hold-out, and of each task that names no number of its own
    num_drafted: int | None = None  # K; None = the drafter's block_size - 1
    temperature: float = 0.0  # runner: of the extra sampled pass, 0 = greedy only; server: of every request
    top_p: float = 1.0  # of sampling; 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # 0 = off
    draft_sampling: str = "argmax"  # argmax | selector: how proposals are made when temperature > 0
    dtype: str = "float32"  # greedy equality is exact in fp32
    baseline: bool = True  # plain decoding of the same prompts, for equality and speed
    seed: int = 0  # of sampling
    pack_weights: bool = True  # on a CPU with oneDNN: lay linear weights out for it, for both decoders
    spread_target: bool = False  # one target over all visible GPUs, by accelerate's device map
    tasks: list[EvalTaskConfig] = field(default_factory=list)  # empty = the experiment's hold-out
    allow_trained_prompts: bool = False  # measure tasks of which training saw prompts; the result is labelled
    sweep: EvalSweepConfig = field(default_factory=EvalSweepConfig)  # mode=runner: several K and temperatures
    server: EvalServerConfig = field(default_factory=EvalServerConfig)
    gate: GateConfig = field(default_factory=GateConfig)

    def check(self, drafter: DrafterConfig) -> None:
        require(self.mode in MODES, "eval.mode", self.mode, f"must be one of {MODES}", "Use runner.")
        require(self.dtype in DTYPES, "eval.dtype", self.dtype, f"must be one of {DTYPES}", "Use float32.")
        require(self.max_new_tokens > 0, "eval.max_new_tokens", self.max_new_tokens, "must be positive", "Use 128.")
        require(self.temperature >= 0, "eval.temperature", self.temperature, "must be at least 0", "Use 0 for greedy.")
        require(
            self.draft_sampling in ("argmax", "selector"),
            "eval.draft_sampling",
            self.draft_sampling,
            "must be argmax or selector",
            "Use argmax.",
        )
        require(
            self.max_prompts is None or self.max_prompts > 0,
            "eval.max_prompts",
            self.max_prompts,
            "must be positive",
            "Use null for all of them.",
        )
        require(0 < self.top_p <= 1, "eval.top_p", self.top_p, "must lie in (0, 1]", "Use 1.0 for off.")
        require(self.top_k >= 0, "eval.top_k", self.top_k, "must be 0 (off) or positive", "Use 0.")
        require(0 <= self.min_p < 1, "eval.min_p", self.min_p, "must lie in [0, 1)", "Use 0 for off.")
        require(
            self.num_drafted is None or 1 <= self.num_drafted <= drafter.num_drafted,
            "eval.num_drafted",
            self.num_drafted,
            f"must lie between 1 and drafter.block_size - 1 = {drafter.num_drafted}",
            "Leave it null for all of them.",
        )
        if self.mode == "server":
            self.server.check()
            require(not self.sweep.is_set, "eval.sweep", self.sweep, "needs eval.mode=runner", SERVER_SWEEP)
        self.sweep.check(drafter.num_drafted)
        self._check_tasks()
        self.gate.check()

    def _check_tasks(self) -> None:
        for number, task in enumerate(self.tasks):
            task.check(f"eval.tasks[{number}]")
        names = [task.name for task in self.tasks]
        require(len(set(names)) == len(names), "eval.tasks[*].name", names, "must differ", "Rename one.")
