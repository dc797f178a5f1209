"""States in eight bits: bounded error, half the bytes, and no value that overflows or is lost unseen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from data_gen.cache import fp8
from data_gen.cache.format import CacheIntegrityError, CaptureManifest, shard_name
from data_gen.cache.reader import CaptureReader
from data_gen.cache.shard_file import ShardReader, write_shard_file
from data_gen.capture import capture_content, token_bytes
from tests.cache_cases import FP8_MANIFEST, TOP_K, VOCAB, make_cache, make_sample
from tests.cases import tiny_run_config
from tests.toy_target import write_model, write_tokenizer

TAPS, HIDDEN, TOKENS = 3, 64, 40
OUTLIERS = [3, 41]  # channels
HALF_STEP = 2.0**-4  # of e4m3: three mantissa bits
BF16_STEP = 2.0**-8


def outlier_states() -> torch.Tensor:
    """[S, T*H] bf16: unit noise of another size for each token and tap, and two channels a hundred times larger."""
    torch.manual_seed(0)
    states = torch.randn(TOKENS, TAPS, HIDDEN) * torch.logspace(-3, 3, TOKENS)[:, None, None]
    states[:, :, OUTLIERS] *= 100
    return states.flatten(1).bfloat16()


def test_the_error_of_every_value_is_at_most_half_a_step_of_e4m3() -> None:
    states = outlier_states()
    codes, factors = fp8.encode(states, TAPS)
    decoded = fp8.decode(codes, factors)
    exact, read = states.double().unflatten(-1, (TAPS, -1)), decoded.double().unflatten(-1, (TAPS, -1))
    smallest_normal = factors.double()[..., None] * 2.0**-6
    bound = torch.maximum(exact.abs(), smallest_normal) * (HALF_STEP + BF16_STEP)
    assert bool(((read - exact).abs() <= bound).all())
    below = exact.abs() < smallest_normal
    assert 0 < below.double().mean() < 0.01, "outliers leave almost every value its full relative accuracy"
    ordinary = torch.ones(HIDDEN, dtype=torch.bool).index_fill(0, torch.tensor(OUTLIERS), False)
    rest = (read - exact)[..., ordinary].norm() / exact[..., ordinary].norm()
    assert 0.02 < float(rest) < 0.03, "the usual rounding of three bits, outliers or not"


def test_the_largest_value_of_every_tap_is_exact_and_nothing_overflows() -> None:
    states = outlier_states()
    codes, factors = fp8.encode(states, TAPS)
    assert bool((codes.float().unflatten(-1, (TAPS, -1)).abs().amax(-1) == fp8.LARGEST_CODE).all())
    assert not fp8.has_nan(codes)
    largest = [tensor.unflatten(-1, (TAPS, -1)).abs().amax(-1) for tensor in (states, fp8.decode(codes, factors))]
    assert torch.equal(*largest)


def test_decoding_agrees_with_the_librarys_own_conversion_for_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(2, 1).view(torch.float8_e4m3fn)
    for exponent in (-110, -3, 0, 117):
        factors = torch.full((2, 2), 2.0**exponent)
        expected = (codes.double() * 2.0**exponent).bfloat16()
        assert torch.equal(fp8.decode(codes, factors), expected)
        out = torch.empty_like(expected)
        assert fp8.decode(codes, factors, out) is out and torch.equal(out, expected)


def test_subnormal_codes_survive_a_process_that_flushes_denormals() -> None:
    codes = torch.arange(8, dtype=torch.uint8)[None].view(torch.float8_e4m3fn)
    torch.set_flush_denormal(True)
    try:
        decoded = fp8.decode(codes, torch.ones(1, 1))
    finally:
        torch.set_flush_denormal(False)
    assert decoded.tolist() == [[code * 2.0**-9 for code in range(8)]]


@pytest.mark.parametrize("value", [0.0, 1e-37, 3e-39, 448.0, 449.0, 6.5e4, 8e37])
def test_extreme_values_come_back_finite_and_in_place(value: float) -> None:
    states = torch.zeros(2, TAPS * HIDDEN, dtype=torch.bfloat16)
    states[1, HIDDEN] = -value
    decoded = fp8.decode(*fp8.encode(states, TAPS))
    assert bool(decoded.isfinite().all())
    assert bool((decoded[0] == 0).all()) and bool((decoded[1, :HIDDEN] == 0).all())
    # The smallest factor is 2^-110: what lies below 2^-119 of anything is nought, as it is beside any other state.
    assert float(decoded[1, HIDDEN]) == pytest.approx(float(states[1, HIDDEN]), rel=HALF_STEP, abs=2.0**-119)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**126])
def test_states_that_cannot_be_stored_are_refused(value: float) -> None:
    states = torch.zeros(2, TAPS * HIDDEN, dtype=torch.bfloat16)
    states[1, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        fp8.encode(states, TAPS)


def test_a_cache_of_eight_bits_gives_the_encoded_states_and_everything_else_bit_for_bit(tmp_path: Path) -> None:
    samples = make_cache(tmp_path, manifest=FP8_MANIFEST)
    reader = CaptureReader(tmp_path)
    for place, sample in enumerate(samples):
        read = reader.read(place)
        assert read.tap_hidden.dtype == torch.bfloat16
        assert torch.equal(read.tap_hidden, fp8.decode(*fp8.encode(sample.tap_hidden, FP8_MANIFEST.num_taps)))
        assert torch.equal(read.teacher_logprobs, sample.teacher_logprobs)
        assert torch.equal(read.loss_mask, sample.loss_mask)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -3.0])
def test_the_largest_magnitude_tells_zeros_signs_and_what_is_not_finite(value: float) -> None:
    states = torch.zeros(2, TAPS * HIDDEN, dtype=torch.bfloat16)
    states[1, HIDDEN + 7] = value
    states[1, HIDDEN + 9] = 1.0
    largest = fp8.largest_magnitudes(states, TAPS)
    assert largest.dtype == torch.bfloat16 and largest[0].tolist() == [0, 0, 0]
    assert torch.equal(largest[1, 1], torch.tensor(value).abs().bfloat16()) or bool(largest[1, 1].isnan())
    assert bool(largest[1, 1].isnan()) == (value != value)
    assert largest[1].tolist()[::2] == [0, 0]


def test_the_nan_code_is_found_although_the_digest_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(states: torch.Tensor, num_taps: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes, factors = encode(states, num_taps)
        codes.view(torch.uint8)[0, 0] = fp8.NAN_CODE
        return codes, factors

    encode = fp8.encode
    monkeypatch.setattr(fp8, "encode", broken)
    make_cache(tmp_path, shards=1, manifest=FP8_MANIFEST)
    with pytest.raises(CacheIntegrityError, match="not numbers"):
        ShardReader(tmp_path / shard_name(0), FP8_MANIFEST).check_content()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_the_bytes_a_token_that_a_plan_counts_on_are_those_of_a_shard(tmp_path: Path, dtype: str) -> None:
    config = tiny_run_config(tmp_path)
    config.data.store.dtype, config.target.name = dtype, str(tmp_path / "target")
    write_tokenizer(tmp_path / "target")
    write_model(tmp_path / "target")
    config.check()
    content = {**capture_content(config, {"backend": "hf"}), "vocab_size": VOCAB, "teacher_top_k": TOP_K}
    width = config.target.hidden_size * len(config.drafter.target_layer_ids)
    sample = dataclasses.replace(make_sample("s", length=50), tap_hidden=torch.randn(50, width).bfloat16())
    write_shard_file(tmp_path / shard_name(0), [sample], CaptureManifest(content=content))
    tensors = ShardReader(tmp_path / shard_name(0), CaptureManifest(content=content)).tensors
    size = sum(tensor.nbytes for name, tensor in tensors.items() if name != "offsets")
    config.data.teacher_top_k = TOP_K
    assert size == 50 * token_bytes(config)
    assert tensors["tap_hidden"].nbytes == 50 * width * (2 if dtype == "bfloat16" else 1)
