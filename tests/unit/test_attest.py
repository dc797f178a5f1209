"""A cache that is not what the target would compute is refused before a step is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_gen.cache.format import CacheIntegrityError
from data_gen.cache.reader import CaptureReader
from data_gen.cache.writer import CaptureWriter
from dflash2_train.attest import attest
from dflash2_train.config import RunConfig
from tests.cases import tiny_run_config
from tests.tiny_target import cache_manifest, captured, save_tiny_llama, write_cache


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    root = tmp_path_factory.mktemp("attest")
    config = tiny_run_config(root)
    config.target.name, config.target.dtype = str(root / "target"), "float32"
    config.data.teacher_top_k, config.data.min_agreement = 8, 0.05
    write_cache(save_tiny_llama(root / "target", config), config, samples=4, length=20)
    return config


def reader_of(config: RunConfig) -> CaptureReader:
    return CaptureReader(Path(config.data.root) / "capture")


def rewrite(config: RunConfig, root: Path, taps: list[int], ids: list[int]) -> CaptureReader:
    """A cache that claims the config's taps but holds those of ``taps``, for the text ``ids``."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(config.target.name)
    writer = CaptureWriter(root / "capture", cache_manifest(config))
    claimed = config.drafter.target_layer_ids
    config.drafter.target_layer_ids = taps
    sample = captured(model, config, "s", ids, prompt=4)
    config.drafter.target_layer_ids = claimed
    writer.write_shard(0, [sample])
    return CaptureReader(root / "capture")


def test_a_faithful_cache_passes_with_an_error_of_rounding_size(config: RunConfig) -> None:
    attested = attest(reader_of(config), config.target, config.drafter, config.data)
    assert attested.tokens >= config.data.min_attested_tokens
    assert attested.relative_error < 0.01
    assert 0 < attested.argmax <= attested.in_top_k <= 1


def test_layers_shifted_by_one_are_refused_with_the_error_found(config: RunConfig, tmp_path: Path) -> None:
    shifted = rewrite(config, tmp_path, [1, 3, 4], list(range(5, 45)))
    with pytest.raises(CacheIntegrityError, match="capture again"):
        attest(shifted, config.target, config.drafter, config.data)


def test_text_that_the_target_did_not_write_is_refused_with_the_share_found(config: RunConfig) -> None:
    config.data.min_agreement = 1.0
    try:
        with pytest.raises(CacheIntegrityError, match="not written by"):
            attest(reader_of(config), config.target, config.drafter, config.data)
    finally:
        config.data.min_agreement = 0.05


def test_a_mask_token_that_occurs_in_the_text_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with_mask = rewrite(config, tmp_path, [0, 2, 4], [*range(5, 30), config.drafter.mask_token_id, 7, 8])
    with pytest.raises(CacheIntegrityError, match="mask_token_id"):
        attest(with_mask, config.target, config.drafter, config.data)
