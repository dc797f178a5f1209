"""Engines that write answers and read the target's states: vLLM, plain transformers as the reference, and servers.

``data.backend`` chooses, and nothing else does: a backend that cannot start is an error, never a reason for the other.
Servers answer only; ``data.capture_backend`` then says who reads the states.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash2_train.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from data_gen.backends.base import CaptureBackend, GenerateBackend, SamplingSettings


def _need_vllm() -> None:
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "data.backend='vllm': vLLM is not installed. Install it (see the installation notes), or choose the slow "
            "reference with data.backend=hf."
        )


def open_generator(config: RunConfig, folder: Path, sampling: SamplingSettings) -> GenerateBackend:
    """The configured backend, started, for answering prompts."""
    if config.data.backend == "hf":
        from data_gen.backends.hf import HfGenerator

        return HfGenerator(folder, config.target, config.data, sampling)
    if config.data.backend == "server":
        from data_gen.backends.server import ServerGenerator

        return ServerGenerator(config.target, config.data, sampling)
    _need_vllm()
    from data_gen.backends.vllm_engine import VllmGenerator

    return VllmGenerator(folder, config.target, config.data, sampling)


def open_capturer(config: RunConfig, folder: Path) -> CaptureBackend:
    """The configured backend, started, for reading states."""
    taps = list(config.drafter.target_layer_ids)
    if config.data.capturer == "hf":
        from data_gen.backends.hf import HfCapturer

        return HfCapturer(folder, config.target, config.data, taps)
    _need_vllm()
    from data_gen.backends.vllm_engine import VllmCapturer

    return VllmCapturer(folder, config.target, config.data, taps)
