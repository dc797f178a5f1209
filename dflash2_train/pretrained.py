"""A target as a transformers model: which class builds it, and loading it frozen.

Most targets are causal language models. Some (GLM-5.3-Flash, ``glm5_next``) exist only as the text half of a
multimodal class, which reads plain token ids just the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_train.config import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


def model_class(config: PretrainedConfig) -> Any:
    """The transformers auto class that builds a model with an output head from ``config``.

    Raises:
        ConfigError: the installed transformers has none for this model type.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    own_code = config.to_dict().get("auto_map") or {}
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in own_code:
        return AutoModelForCausalLM
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    raise ConfigError(
        f"target: the installed transformers builds no language model of model_type={config.model_type!r}. "
        "Install a newer one, or set target.trust_remote_code=true for a model with code of its own."
    )


def load_pretrained(
    source: str | Path,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model in evaluation mode, without gradients.

    Args:
        source: a model folder or a Hub id.
        dtype: of the weights, but for those that the architecture keeps in float32.
        device: to run on; "auto" spreads the layers over all visible GPUs, by accelerate.
        revision: commit of a Hub id.
        trust_remote_code: run code that comes with the model.

    Raises:
        ConfigError: see :func:`model_class`.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(source), revision=revision, trust_remote_code=trust_remote_code)
    model: PreTrainedModel = model_class(config).from_pretrained(
        str(source),
        revision=revision,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        device_map=device if device == "auto" else None,
    )
    if device != "auto":
        model = model.to(device)
    return model.eval().requires_grad_(False)
