"""Every architecture's taps and teacher, against definitions that share no code with the backend.

The reference for a tap is what the *next* layer gets to read (the last one: what the final norm reads), which is how
servers define it; the backend reads what a layer hands on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from data_gen.backends.base import CapturedStates, CaptureRequest
from data_gen.backends.folder import model_config
from data_gen.backends.head import HeadRule, TeacherHead, place_rows
from data_gen.backends.hf import HfCapturer
from data_gen.cache.format import CacheIntegrityError
from data_gen.capture_rows import check_backend
from dflash2_train.config import DataConfig, TargetConfig
from dflash2_train.pretrained import load_pretrained
from dflash2_train.streams import TapRecorder
from dflash2_train.taps import hf_hidden_state_index
from tests.architectures import BUILDERS, HIDDEN, LAYERS, OTHERS, TARGETS, write_architecture
from tests.toy_target import WORDS

TAPS = [0, 2, 3, 4]  # the last layer too
TOP_K = 8
LENGTHS = (23, 9, 14, 23, 5)
# Batches of other shapes take other routes through the matrix products; fp32 rounding of five layers, relative.
ROUNDING = 2e-5


class Reference(NamedTuple):
    """A plain forward of one sequence."""

    streams: list[Tensor]  # [S, H] after every layer
    logits: Tensor  # [S, V]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
    for name in BUILDERS:
        write_architecture(root / name, name)
    return {name: root / name for name in BUILDERS}


def sequence(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, len(WORDS), (length,), generator=generator).tolist()


@functools.cache
def model_of(folder: Path) -> Any:
    return load_pretrained(folder, torch.float32)


def reference(folder: Path, ids: list[int]) -> Reference:
    model = model_of(folder)
    decoder, read = model.get_decoder(), []

    def note(_module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        state = arguments[0] if arguments else named["hidden_states"]
        read.append(state.mean(dim=2)[0] if state.ndim == 4 else state[0])

    readers = [*decoder.layers[1:], decoder.norm]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in readers]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    for handle in handles:
        handle.remove()
    return Reference(read, logits)


def open_capturer(folder: Path, **changes: Any) -> HfCapturer:
    target = TargetConfig(
        name=str(folder),
        license="mit",
        dtype="float32",
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        vocab_size=len(WORDS),
    )
    settings = {"max_num_seqs": 4, "max_prompt_tokens": 32, "teacher_top_k": TOP_K, **changes}
    return HfCapturer(folder, target, DataConfig(root="-", train_prompts=[], holdout_prompts=[], **settings), TAPS)


def requests() -> Iterator[CaptureRequest]:
    for number, length in enumerate(LENGTHS):
        yield CaptureRequest(request_id=f"r{number}", input_ids=sequence(length), first_teacher_row=2)


def nothing() -> None:
    pass


@pytest.mark.parametrize("name", TARGETS)
def test_taps_are_what_the_next_layer_reads_bit_for_bit(folders: dict[str, Path], name: str) -> None:
    model, ids = model_of(folders[name]), sequence(23)
    with torch.inference_mode(), TapRecorder(model, TAPS) as recorder:
        model(torch.tensor([ids]))
        streams = recorder.take()
    expected = reference(folders[name], ids).streams
    assert len(expected) == LAYERS
    assert all(torch.equal(streams[tap][0], expected[tap]) for tap in TAPS)


@pytest.mark.parametrize("name", TARGETS)
def test_taps_are_the_hidden_states_of_the_next_index_bit_for_bit(folders: dict[str, Path], name: str) -> None:
    model, ids = model_of(folders[name]), torch.tensor([sequence(23)])
    with torch.inference_mode(), TapRecorder(model, TAPS) as recorder:
        states = model(ids, output_hidden_states=True).hidden_states
        streams = recorder.take()
    for tap in TAPS[:-1]:  # of the last layer they hold the state after the final norm
        state = states[hf_hidden_state_index(tap)]
        assert torch.equal(streams[tap], state.mean(dim=2) if state.ndim == 4 else state)
    last = states[-1]
    assert not torch.allclose(streams[LAYERS - 1], last)


@pytest.mark.parametrize("name", TARGETS)
def test_a_lone_sequence_is_captured_bit_for_bit_with_the_models_own_teacher(
    folders: dict[str, Path], name: str
) -> None:
    (request,) = [request for request in requests() if request.request_id == "r0"]
    (states,) = open_capturer(folders[name]).capture([request], nothing)
    expected = reference(folders[name], request.input_ids)
    assert torch.equal(states.tap_hidden, torch.cat([expected.streams[tap] for tap in TAPS], dim=-1).bfloat16())
    teacher = expected.logits.log_softmax(dim=-1).topk(TOP_K)
    assert torch.equal(states.teacher_ids[2:].long(), teacher.indices[2:])
    torch.testing.assert_close(states.teacher_logprobs[2:].float(), teacher.values[2:], atol=5e-3, rtol=2e-3)
    assert states.next_id == int(expected.logits[-1].argmax())
    assert states.next_logprob == pytest.approx(float(teacher.values[-1, 0]), abs=1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_a_batch_of_unequal_lengths_equals_one_by_one(folders: dict[str, Path], name: str) -> None:
    """Order kept; states equal but for fp32 rounding, of which bf16 storage shows at most its own last bit."""
    capturer = open_capturer(folders[name])
    together = list(capturer.capture(requests(), nothing))
    assert [states.request_id for states in together] == [f"r{number}" for number in range(len(LENGTHS))]
    for request, states in zip(requests(), together, strict=True):
        (alone,) = capturer.capture([request], nothing)
        assert states.input_ids == request.input_ids
        torch.testing.assert_close(states.tap_hidden, alone.tap_hidden, rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(
            states.teacher_log_normaliser, alone.teacher_log_normaliser, rtol=ROUNDING, atol=ROUNDING
        )
        assert torch.equal(states.teacher_ids, alone.teacher_ids)


@pytest.mark.parametrize("name", TARGETS)
def test_rows_of_a_batch_differ_from_a_lone_forward_by_fp32_rounding_only(folders: dict[str, Path], name: str) -> None:
    capturer = open_capturer(folders[name])
    rows = list(requests())[:2] if not capturer._equal_lengths else [list(requests())[0], list(requests())[3]]
    full: dict[int, Tensor] = {}
    original = capturer._states

    def keep(request: CaptureRequest, taps: Tensor, logits: Tensor) -> CapturedStates:
        full[len(full)] = taps[: len(request.input_ids)].clone()
        return original(request, taps, logits)

    capturer._states = keep  # type: ignore[method-assign]
    list(capturer.capture(rows, nothing))
    for row, request in enumerate(rows):
        expected = torch.cat([reference(folders[name], request.input_ids).streams[tap] for tap in TAPS], dim=-1)
        error = (full[row] - expected).abs().max() / expected.abs().max()
        assert float(error) < ROUNDING


@pytest.mark.parametrize(("name", "equal"), [("llama", False), ("qwen3", False), ("glm5_next", True)])
def test_only_plain_attention_is_batched_with_padding(folders: dict[str, Path], name: str, equal: bool) -> None:
    assert open_capturer(folders[name])._equal_lengths is equal


@pytest.mark.parametrize("name", [*TARGETS, *OTHERS])
def test_final_norm_once_and_the_head_give_the_models_own_logits(folders: dict[str, Path], name: str) -> None:
    expected = reference(folders[name], sequence(19))
    head = TeacherHead(folders[name], top_k=TOP_K, dtype=torch.float32)
    ids, logprobs, normaliser = head.rows(expected.streams[-1])
    teacher = expected.logits.float().log_softmax(dim=-1).topk(TOP_K)
    assert torch.equal(ids.long(), teacher.indices)
    torch.testing.assert_close(logprobs.float(), teacher.values, atol=5e-3, rtol=2e-3)
    torch.testing.assert_close(normaliser, expected.logits.float().logsumexp(dim=-1), atol=1e-4, rtol=1e-5)


class ThroughHead:
    """As a serving engine: the teacher through ``TeacherHead``, the next token from the model itself."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.head = folder, TeacherHead(folder, top_k=TOP_K, dtype=torch.float32)

    def capture(self, requests: Iterable[CaptureRequest], _heartbeat: Any) -> Iterator[CapturedStates]:
        for request in requests:
            plain = reference(self.folder, request.input_ids)
            first, length = request.first_teacher_row, len(request.input_ids)
            rows = place_rows(self.head.rows(plain.streams[-1][first:]), first, length)
            said = plain.logits[-1].float().log_softmax(dim=-1).max(dim=-1)
            yield CapturedStates(
                request_id=request.request_id,
                input_ids=request.input_ids,
                tap_hidden=plain.streams[0].bfloat16(),
                teacher_ids=rows[0],
                teacher_logprobs=rows[1],
                teacher_log_normaliser=rows[2],
                next_id=int(said.indices),
                next_logprob=float(said.values),
            )

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("llama", {"multiplier": 0.5}), ("gemma2", {"softcap": None}), ("cohere", {"multiplier": 1.0})]
    + [("granite", {"multiplier": 1.0}), ("qwen3_5", {"norm": "rms"}), ("glm5_next", {"norm": "layer"})],
)
def test_an_engine_whose_logits_the_head_does_not_give_is_refused_at_the_start(
    folders: dict[str, Path], name: str, wrong: dict[str, Any]
) -> None:
    engine = ThroughHead(folders[name])
    check_backend(engine, len(WORDS))
    engine.head.rule = replace(engine.head.rule, **wrong)
    with pytest.raises(CacheIntegrityError, match="final norm, head or logit scale"):
        check_backend(engine, len(WORDS))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("llama", {"norm": "rms", "multiplier": 1.0, "softcap": None}),
        ("gemma2", {"norm": "rms_unit_offset", "softcap": 5.0}),
        ("cohere", {"norm": "layer", "multiplier": 0.25}),
        ("granite", {"norm": "rms", "multiplier": 0.25}),
    ],
)
def test_the_rule_of_a_head_is_read_from_the_configuration(
    folders: dict[str, Path], name: str, rule: dict[str, Any]
) -> None:
    found = HeadRule.from_config(model_config(folders[name]), folders[name])
    assert {key: vars(found)[key] for key in rule} == rule
