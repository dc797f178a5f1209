"""Imported once by the server that the tests' processes are forked from: what a training and a capture load."""

from __future__ import annotations

import importlib
import os

MODULES = (
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "data_gen.backends.hf",
    "data_gen.stream",
    "dflash2_train.plots.training",
    "dflash2_train.training_run",
)

# The libraries ask for GPUs; asked this way, none is opened, and forked processes may still use them.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for name in MODULES:
    importlib.import_module(name)
importlib.import_module("dflash2_train.ranks").import_deepspeed()
