"""Stand-ins for the parts of vLLM that its backend imports, so that our side can be tested without the engine."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

MODULES = (
    "vllm",
    "vllm.distributed",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.parallel_state",
    "vllm.inputs",
    "vllm.outputs",
    "vllm.platforms",
    "vllm.sampling_params",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.sample.logits_processor",
)
OURS = ("vllm_connector", "vllm_sampling", "vllm_engine")


class _Module(ModuleType):
    """A module in which every name is an empty class that takes keyword arguments as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **values: self.__dict__.update(values)})
        setattr(self, name, made)
        return made


def import_backend(monkeypatch: pytest.MonkeyPatch, name: str, *, rank: int = 0) -> Any:
    """``data_gen.backends.<name>`` on top of the stand-ins, on tensor-parallel rank ``rank``; gone after the test."""
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, _Module(module))
    monkeypatch.setattr(sys.modules["vllm.distributed.parallel_state"], "get_tensor_model_parallel_rank", lambda: rank)
    for own in OURS:
        monkeypatch.delitem(sys.modules, f"data_gen.backends.{own}", raising=False)
    imported = importlib.import_module(f"data_gen.backends.{name}")
    for own in OURS:  # registered so that undoing removes what was imported on top of stand-ins
        if f"data_gen.backends.{own}" in sys.modules:
            monkeypatch.setitem(sys.modules, f"data_gen.backends.{own}", sys.modules[f"data_gen.backends.{own}"])
    return imported
