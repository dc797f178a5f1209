"""The frozen target: what its folder states, its embedding and output head, the model and the tokenizer.

A target is a Hugging Face folder or a Hub id. ``transformers`` and the Hub client load on first use.

Letters: V vocabulary (rows of the embedding), H hidden.
"""

from dflash2_train.target.facts import TargetInfo, open_target_config
from dflash2_train.target.files import CONFIG_FILE, DECODER_PREFIXES, HEAD_NAMES, TargetTensors, metadata_folder
from dflash2_train.target.head import FrozenHead, torch_dtype
from dflash2_train.target.model import load_target_model, load_tokenizer

__all__ = [
    "CONFIG_FILE",
    "DECODER_PREFIXES",
    "HEAD_NAMES",
    "FrozenHead",
    "TargetInfo",
    "TargetTensors",
    "load_target_model",
    "load_tokenizer",
    "metadata_folder",
    "open_target_config",
    "torch_dtype",
]
