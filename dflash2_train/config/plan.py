"""What plans of data and training reckon with: the hardware, and what is assumed where nothing was counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash2_train.config.rules import require

DEVICE_KINDS = ("cuda", "cpu")


@dataclass(kw_only=True)
class HardwareConfig:
    """The machine that a plan is made for. Peaks are the vendor's; shares of them are in :class:`PlanConfig`."""

    name: str = "one device"  # as printed
    devices: int = 1  # GPUs; on a CPU processes. A training has one rank on each
    kind: str = "cuda"  # cuda | cpu: which kernels run, and whether ranks share their memory with the host
    memory_gb: float | None = None  # of one device, 1e9 bytes, on a CPU of the machine; None = not checked
    host_memory_gb: float | None = None  # of the machine that holds all devices, 1e9 bytes; None = not checked
    bf16_tflops: float | None = None  # dense peak of one device; None = rates must be measured
    memory_gb_per_s: float | None = None  # peak of one device
    price_per_hour: float | None = None  # of one device, in the currency of your bill; None = no cost column

    def check(self) -> None:
        """Refuse numbers that no machine has."""
        require(self.devices > 0, "plan.hardware.devices", self.devices, "must be positive", "Count the GPUs.")
        kind = self.kind
        require(kind in DEVICE_KINDS, "plan.hardware.kind", kind, f"must be one of {DEVICE_KINDS}", "Pick one.")
        for key in ("memory_gb", "host_memory_gb", "bf16_tflops", "memory_gb_per_s", "price_per_hour"):
            value = getattr(self, key)
            require(
                value is None or value > 0, f"plan.hardware.{key}", value, "must be positive", "Use null if unknown."
            )


@dataclass(kw_only=True)
class PlanConfig:
    """Assumptions of a plan. Everything that can be counted or measured wins over them and is said to."""

    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    prompts: int | None = None  # training prompts; None = read the sources and count
    prompt_tokens: float = 400.0  # mean of a prompt, where the sources are not read
    answer_tokens: float | None = None  # mean of an answer; None = data.sampling.max_tokens, which is the most
    probe_seconds: float = 0.0  # run the target so long to measure the two rates below; 0 = no probe
    regenerate_tokens_per_s: float | None = None  # answer tokens of the whole machine; None = probe's, else estimated
    capture_tokens_per_s: float | None = None  # prompt and answer tokens, likewise
    train_seconds_per_step: float | None = None  # measured; None = estimated from the peaks

    # The next three are common values for well-kept kernels, not measurements of this code.

    decode_bandwidth_share: float = 0.5  # of the memory's peak, that estimates of regenerate take
    prefill_flops_share: float = 0.35  # of the arithmetic peak, that estimates of capture take
    train_flops_share: float = 0.25  # of the arithmetic peak, that estimates of training take
    memory_share: float = 0.9  # of a device that a training may take; the rest is left to what no plan knows

    def check(self) -> None:
        """Refuse values that make no plan."""
        self.hardware.check()
        for key in (
            "prompts",
            "answer_tokens",
            "regenerate_tokens_per_s",
            "capture_tokens_per_s",
            "train_seconds_per_step",
        ):
            value = getattr(self, key)
            require(value is None or value > 0, f"plan.{key}", value, "must be positive", "Use null to have it found.")
        require(self.prompt_tokens > 0, "plan.prompt_tokens", self.prompt_tokens, "must be positive", "Use 400.")
        require(self.probe_seconds >= 0, "plan.probe_seconds", self.probe_seconds, "must be at least 0", "Use 60.")
        for key in ("decode_bandwidth_share", "prefill_flops_share", "train_flops_share", "memory_share"):
            value = getattr(self, key)
            require(0 < value <= 1, f"plan.{key}", value, "is a share, in (0, 1]", "Use 0.3.")
