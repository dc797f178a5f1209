"""All gates of one cache, in one go."""

from __future__ import annotations

import logging

from data_gen.cache.format import CacheIntegrityError
from dflash2_train.attest.forward import compare_with_forward, forward_gates
from dflash2_train.attest.gate import Attestation
from dflash2_train.attest.labels import label_gates, look_at_labels
from dflash2_train.attest.records import Conversations, record_gates
from dflash2_train.attest.samples import Samples
from dflash2_train.config import RunConfig, absolute
from dflash2_train.target import metadata_folder, open_target_config

logger = logging.getLogger(__name__)


def attest(samples: Samples, config: RunConfig) -> Attestation:
    """Evaluate every gate; refuses nothing itself (see :meth:`Attestation.refuse`).

    Args:
        samples: the cache.
        config: the experiment; its conversations are read where they lie beside the cache.

    Raises:
        ConfigError: the target cannot be opened.
        CacheIntegrityError: a file of the cache cannot be read.
    """
    content, limits = samples.manifest.content, config.data.attest
    taps = list(config.drafter.target_layer_ids)
    if content["target_layer_ids"] != taps:
        raise CacheIntegrityError(
            f"drafter.target_layer_ids={taps}: the cache holds {content['target_layer_ids']}. Capture again."
        )
    conversations = Conversations.read(absolute(config.data.root))
    info = open_target_config(config.target)
    labels = look_at_labels(samples, conversations.sources, config.drafter.mask_token_id, limits.label_tokens)
    forward = compare_with_forward(samples, config.target, taps, limits.tokens) if limits.tokens else None
    attestation = Attestation(
        gates=[
            *record_gates(
                content,
                conversations,
                metadata_folder(config.target),
                info.target_hash,
                config.data.enable_thinking,
            ),
            *label_gates(samples, labels, config.drafter.mask_token_id, limits),
            *forward_gates(forward, taps, str(content.get("cache_dtype", "bfloat16")), limits),
        ],
        tokens=0 if forward is None else forward.tokens,
        relative_error=0.0 if forward is None else max(forward.error(tap) for tap in taps),
        in_top_k=labels.share("in_top_k"),
        argmax=labels.share("argmax"),
    )
    failed = len(attestation.failed())
    logger.info("cache attested: %d gates, %d failed", len(attestation.gates), failed)
    return attestation
