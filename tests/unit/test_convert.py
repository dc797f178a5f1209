"""Drafters of other tools, converted to this one's layout and back: the same tensors, the same meaning, losses said."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash2_train.config import ConfigError, UserError
from dflash2_train.evaluate.subject import describe_models, drafter_folder
from dflash2_train.export.commands import dispatch
from dflash2_train.export.convert.command import STYLE_NAMES
from dflash2_train.export.convert.conversion import Plan, Request, convert, plan_conversion
from dflash2_train.export.convert.source import STYLES, stated_licence
from dflash2_train.export.convert.style import ConvertError, Hints
from dflash2_train.export.convert.target_rows import Target, open_named_target
from dflash2_train.export.doctor import check_folder
from dflash2_train.export.hf import load_drafter
from dflash2_train.export.rewrite import rewrite_papers
from dflash2_train.export.verify import BAD, verify
from dflash2_train.export.weight_files import WeightFiles
from dflash2_train.lineage import warm_start_chain
from dflash2_train.provenance import sha256_file
from dflash2_train.runner import DecodeSettings, generate_batch, plain_decode
from dflash2_train.runner.propose import DraftProposer
from dflash2_train.warm_start import warm_drafter
from tests.cases import edit_json, tiny_run_config
from tests.foreign_drafters import (
    HIDDEN,
    MASK_ID,
    SHAPE,
    TARGET_LAYERS,
    WIDTH,
    random_tensors,
    write_angelspec,
    write_specforge,
    write_speculators,
    write_zlab,
)
from tests.reports import write_report
from tests.tiny_target import save_tiny_llama

HINTS = Hints(block_size=WIDTH, num_target_layers=TARGET_LAYERS)
Writer = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The tiny target that every drafter here is for."""
    folder = tmp_path_factory.mktemp("target")
    save_tiny_llama(folder, tiny_run_config(folder))
    return open_named_target(str(folder), None)


def embedding(target: Target) -> Tensor:
    assert target.embedding is not None
    return target.embedding.whole()


def plan(folder: Path, to: str = "hf", target: Target | None = None, **options: Any) -> Plan:
    """A plan with what AngelSpec and speculators leave open, unless the target says it."""
    style = plan_style(folder)
    hints = Hints(
        block_size=WIDTH if style == "angelspec" else None,
        num_target_layers=TARGET_LAYERS if style == "speculators" and target is None else None,
    )
    return plan_conversion(folder, Request(to=STYLES[to], **{"hints": hints, "target": target} | options))


def plan_style(folder: Path) -> str:
    keys = json.loads((folder / "config.json").read_text())
    if "speculators_model_type" in keys:
        return "speculators"
    return "angelspec" if "target_num_hidden_layers" in keys else "published"


def converted(folder: Path, output: Path, to: str = "hf", target: Target | None = None, **options: Any) -> Path:
    return convert(plan(folder, to, target, **options), output, name=str(folder), commit=None)


def refusal(folder: Path, to: str = "hf", target: Target | None = None, **options: Any) -> str:
    with pytest.raises(ConvertError) as caught:
        plan(folder, to, target, **options)
    return str(caught.value)


def read_config(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


def ours(folder: Path, target: Target, **options: Any) -> Path:
    """A DFlash 2 of this project's own whose mask vector is trained."""
    out = converted(write_zlab(folder.with_name("published"), **options), folder, target=target)
    torch.save(torch.randn(SHAPE.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16(), out / MASK_FILE)
    (out / "run.json").unlink()
    (out / "PROVENANCE.txt").unlink()
    return out


MASK_FILE = "mask_embedding.pt"

TO_OURS = {
    "zlab 2": (write_zlab, {"second": True}),
    "zlab 1": (write_zlab, {"second": False}),
    "specforge 2": (write_specforge, {"second": True}),
    "specforge 1": (write_specforge, {"second": False}),
    "speculators 2": (write_speculators, {"second": True}),
    "speculators 1": (write_speculators, {"second": False}),
}


@pytest.fixture(params=[*TO_OURS, "angelspec"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path, target: Target) -> tuple[Path, bool]:
    """A drafter of another tool, and whether it is a DFlash 2."""
    if request.param == "angelspec":
        return write_angelspec(tmp_path / "source", embedding(target)), False
    writer, options = TO_OURS[request.param]
    return writer(tmp_path / "source", **options), options["second"]


def test_every_style_becomes_a_folder_that_the_doctor_has_nothing_to_say_about(
    foreign: tuple[Path, bool], tmp_path: Path, target: Target
) -> None:
    out = converted(foreign[0], tmp_path / "out", target=target)
    assert [str(finding) for finding in check_folder(out, target_info=target.info)] == []


def test_every_tensor_is_the_sources_bit_for_bit_and_none_is_added(
    foreign: tuple[Path, bool], tmp_path: Path, target: Target
) -> None:
    out = load_file(converted(foreign[0], tmp_path / "out", target=target) / "model.safetensors")
    expected = random_tensors(second=foreign[1])
    assert out.keys() == expected.keys()
    assert all(torch.equal(out[name], expected[name]) and out[name].dtype == torch.bfloat16 for name in expected)


def test_the_drafter_means_the_same_in_every_style(foreign: tuple[Path, bool], tmp_path: Path, target: Target) -> None:
    out = converted(foreign[0], tmp_path / "out", target=target)
    published, nested = read_config(out), read_config(out)["dflash_config"]
    assert nested["target_layer_ids"] == [0, 2, 4]  # speculators stores 1, 3, 5
    assert (published["block_size"], nested["block_size"]) == (WIDTH, WIDTH)
    assert published["num_target_layers"] == TARGET_LAYERS
    assert published["is_causal"] is False
    assert published["rope_parameters"]["rope_theta"] == 1e6
    assert published["architectures"] == ["DFlash2DraftModel" if foreign[1] else "DFlashDraftModel"]
    assert ("selector_rank" in nested) is foreign[1]


def test_mask_slots_get_the_row_that_the_other_tools_embed(
    foreign: tuple[Path, bool], tmp_path: Path, target: Target
) -> None:
    out = converted(foreign[0], tmp_path / "out", target=target)
    vector = torch.load(out / MASK_FILE, weights_only=True)
    assert torch.equal(vector, embedding(target)[MASK_ID].bfloat16())


def test_training_starts_from_what_was_converted(foreign: tuple[Path, bool], tmp_path: Path, target: Target) -> None:
    out = converted(foreign[0], tmp_path / "out", target=target)
    drafter = warm_drafter(str(out), SHAPE, embedding(target))
    for name, tensor in random_tensors(second=foreign[1]).items():
        assert torch.equal(drafter.state_dict()[name], tensor.float()), name
    assert warm_start_chain(str(out))[0]["converted_from"]["files"]["config.json"] == sha256_file(
        foreign[0] / "config.json"
    )


def test_every_recorded_hash_of_a_conversion_holds_and_an_edit_shows(
    foreign: tuple[Path, bool], tmp_path: Path, target: Target
) -> None:
    out = converted(foreign[0], tmp_path / "out", target=target)
    assert [check for check in verify(out) if check.verdict in BAD] == []
    edit_json(out / "config.json", rms_norm_eps=1e-5)
    assert [check.what for check in verify(out) if check.verdict in BAD] != []


def test_the_runner_loads_a_converted_dflash_2(tmp_path: Path, target: Target) -> None:
    out = converted(write_speculators(tmp_path / "source"), tmp_path / "out", target=target)
    assert load_drafter(out, torch.float32).shape == SHAPE


@pytest.mark.parametrize("sliding", [False, True])
def test_the_runner_decodes_with_a_converted_dflash_1_and_changes_no_token(
    sliding: bool, tmp_path: Path, target: Target
) -> None:
    options = {"is_causal": False, "sliding_window": 6, "use_sliding_window": True} if sliding else {}
    source = write_zlab(tmp_path / "source", second=False, sliding=sliding, **options)
    drafter = load_drafter(converted(source, tmp_path / "out", target=target), torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.float32).eval()
    prompts = [[5, 17, 9, 40], [61, 2, 33, 8, 70, 12, 4]]
    for temperature in (0.0, 1.0):
        settings = DecodeSettings(
            max_new_tokens=24, num_drafted=WIDTH - 1, stop_ids=frozenset(), temperature=temperature
        )
        results = generate_batch(model, drafter, prompts, settings, torch.Generator().manual_seed(0))
        assert all(len(result.token_ids) == 24 for result in results)
        if temperature == 0:
            assert [result.token_ids for result in results] == [
                plain_decode(model, prompt, settings).token_ids for prompt in prompts
            ]


def test_a_dflash_1_is_measured_with_argmax_proposals_and_no_others(tmp_path: Path, target: Target) -> None:
    config = tiny_run_config(tmp_path)
    config.target.name = target.name
    source = write_zlab(tmp_path / "source", second=False)
    out = converted(source, tmp_path / "out", target=target, max_shard_gib=12000 / 2**30)
    config.eval.drafter = str(out)
    assert drafter_folder(config) == out
    hashes = describe_models(config, out)["drafter_sha256"]
    assert hashes == {name: sha256_file(out / name) for name in hashes}
    assert len(hashes) > 4, "every shard counts"
    config.eval.draft_sampling = "selector"
    with pytest.raises(ConfigError, match="has no selector"):
        describe_models(config, out)
    (out / MASK_FILE).unlink()
    with pytest.raises(ConfigError, match=r"mask_embedding\.pt is missing.*convert SOURCE FOLDER --target"):
        drafter_folder(config)


@torch.no_grad()
def test_a_dflash_1_proposes_the_best_unary_token_of_every_slot(tmp_path: Path, target: Target) -> None:
    drafter = load_drafter(
        converted(write_zlab(tmp_path / "source", second=False), tmp_path / "out", target=target), "float32"
    )
    head = torch.nn.Linear(HIDDEN, SHAPE.vocab_size, bias=False)
    proposer = DraftProposer(
        drafter.eval(), embedding_weight=embedding(target), head=head, num_drafted=WIDTH - 1, capacity=32
    )
    proposer.start(0, torch.randn(9, len(SHAPE.target_layer_ids) * HIDDEN))
    hidden = proposer._block_hidden([4], [9])[:, 1:]
    assert torch.equal(proposer.propose([4], [9]).draft_ids, head(hidden).argmax(-1))


@pytest.mark.parametrize("style", ["zlab", "specforge", "speculators"])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("sliding", [True, False])
def test_there_and_back_again_is_the_same_drafter(
    style: str, second: bool, sliding: bool, tmp_path: Path, target: Target
) -> None:
    options = {"is_causal": False} if sliding else {}
    if sliding and not second:
        options |= {"sliding_window": 6, "use_sliding_window": True}
    source = write_zlab(tmp_path / "source", second=second, sliding=sliding, **options)
    first = converted(source, tmp_path / "first", target=target)
    there = converted(first, tmp_path / "there", style, target)
    back = converted(there, tmp_path / "back", target=target)
    names = ("config.json", "model.safetensors", MASK_FILE)
    assert all((first / name).read_bytes() == (back / name).read_bytes() for name in names)
    assert json.loads((there / "run.json").read_text())["conversion"]["to"] == style


def test_angelspec_and_back_keeps_a_dflash_1_and_even_its_trained_mask_vector(tmp_path: Path, target: Target) -> None:
    first = ours(tmp_path / "first", target, second=False)
    there = converted(first, tmp_path / "there", "angelspec", target)
    back = converted(there, tmp_path / "back", target=target)
    names = ("config.json", "model.safetensors")
    assert all((first / name).read_bytes() == (back / name).read_bytes() for name in names)
    trained, kept = (torch.load(folder / MASK_FILE, weights_only=True) for folder in (first, back))
    assert torch.equal(trained, kept)
    table = load_file(there / "model.safetensors")["embed_tokens.weight"]
    other = torch.arange(len(table)) != MASK_ID
    assert torch.equal(table[other], embedding(target)[other].bfloat16())


def test_angelspec_names_and_counts_are_its_own(tmp_path: Path, target: Target) -> None:
    there = converted(write_zlab(tmp_path / "source", second=False), tmp_path / "there", "angelspec", target)
    config, tensors = read_config(there), load_file(there / "model.safetensors")
    assert (config["model_type"], config["num_target_layers"], config["target_num_hidden_layers"]) == ("dflash", 3, 6)
    assert {"context_proj.weight", "context_norm.weight", "final_norm.weight", "embed_tokens.weight"} <= tensors.keys()


def test_a_dflash_2_that_does_nothing_of_its_own_may_become_an_angelspec_drafter(
    tmp_path: Path, target: Target
) -> None:
    source = write_zlab(tmp_path / "source")
    assert "trained with them" in refusal(source, "angelspec", target)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("base_kernel"):
            tensor.zero_()[:, 0] = 1
        elif name.endswith(("kernel_projection.weight", "successor_codebook")):
            tensor.zero_()
    save_file(tensors, source / "model.safetensors")
    found = plan(source, "angelspec", target)
    assert found.keeps_function
    assert any("change nothing" in loss.text for loss in found.losses)


@pytest.mark.parametrize("style", ["zlab", "specforge", "speculators"])
def test_a_trained_mask_vector_is_not_dropped_unasked(style: str, tmp_path: Path, target: Target) -> None:
    first = ours(tmp_path / "first", target)
    assert "not the target's row" in refusal(first, style, target)
    assert "--target" in refusal(first, style, None)
    out = converted(first, tmp_path / "out", style, target, accept_losses=True)
    assert not (out / MASK_FILE).exists()
    losses = json.loads((out / "run.json").read_text())["conversion"]["losses"]
    assert [loss["what"] for loss in losses if loss["drafts"]] == ["mask vector"]
    assert "changes the drafts" in (out / "PROVENANCE.txt").read_text()


def test_output_scale_and_soft_cap_are_not_dropped_unasked(tmp_path: Path, target: Target) -> None:
    source = write_zlab(tmp_path / "source")
    nested = read_config(source)["dflash_config"] | {"output_multiplier": 0.5, "final_logit_softcapping": 20.0}
    edit_json(source / "config.json", dflash_config=nested)
    text = refusal(source, "speculators", target)
    assert "output_multiplier" in text
    assert "final_logit_softcapping" in text
    assert read_config(converted(source, tmp_path / "out", target=target))["dflash_config"]["output_multiplier"] == 0.5


def test_without_the_target_the_missing_vector_is_said_and_the_row_is_left_to_the_servers(tmp_path: Path) -> None:
    source = write_zlab(tmp_path / "source")
    out = converted(source, tmp_path / "out")
    assert not (out / MASK_FILE).exists()
    (loss,) = json.loads((out / "run.json").read_text())["conversion"]["losses"]
    assert "--target" in loss["text"]
    assert not loss["drafts"]


def test_own_tables_are_compared_with_the_targets(tmp_path: Path, target: Target) -> None:
    table = embedding(target).bfloat16()
    tables = {"embed_tokens.weight": table.clone(), "lm_head.weight": table.clone()}
    same = write_speculators(tmp_path / "same", tables=tables)
    assert plan(same, target=target).keeps_function
    assert "not compared" in refusal(same)
    tables["lm_head.weight"][3] += 1
    other = write_speculators(tmp_path / "other", tables=tables)
    assert "lm_head.weight is left out, and 1 of its rows are not the target's" in refusal(other, target=target)


def test_the_mask_row_of_an_own_embedding_becomes_the_mask_vector(tmp_path: Path, target: Target) -> None:
    table = embedding(target).bfloat16()
    table[MASK_ID] = torch.arange(SHAPE.hidden_size)
    out = converted(write_angelspec(tmp_path / "source", table), tmp_path / "out", target=target)
    assert torch.equal(torch.load(out / MASK_FILE, weights_only=True), table[MASK_ID])


REFUSED: dict[str, tuple[Writer, dict[str, Any], str]] = {
    "reduced vocabulary": (write_speculators, {"draft_vocab_size": 32}, "draft_vocab_size=32"),
    "embedding as a tap": (write_speculators, {"aux_hidden_state_layer_ids": [0, 3, 5]}, "0 is the target's embedding"),
    "taps beyond the target": (write_speculators, {"aux_hidden_state_layer_ids": [1, 3, 7]}, "0..5"),
    "unsorted taps": (write_speculators, {"aux_hidden_state_layer_ids": [3, 1, 5]}, "ascending"),
    "anchor drafts": (write_speculators, {"sample_from_anchor": True}, "slot 0 drafts"),
    "another type": (write_speculators, {"speculators_model_type": "dspark"}, "'dspark'"),
    "causal sliding": (write_speculators, {"second": False, "sliding": True}, "sliding_window_non_causal=False"),
    "causal or not": (
        write_speculators,
        {"second": False, "sliding": True, "sliding_window_non_causal": ...},
        "sliding_window_non_causal=None",
    ),
    "no mask id": (write_speculators, {"mask_token_id": None}, "mask_token_id is missing"),
    "no is_causal": (write_zlab, {"sliding": True, "is_causal": ...}, "is_causal"),
    "no taps": (write_zlab, {"dflash_config": {"mask_token_id": MASK_ID}, "second": False}, "target_layer_ids"),
    "unknown nested key": (
        write_zlab,
        {"second": False, "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2, 4], "tree_width": 3}},
        "tree_width=3",
    ),
    "half a DFlash 2": (
        write_zlab,
        {"second": False, "architectures": ["DFlash2DraftModel"], "is_causal": False},
        "conv_kernel_size is missing",
    ),
    "yarn": (write_zlab, {"second": False, "rope_scaling": {"rope_type": "yarn", "factor": 64.0}}, "rope_scaling"),
    "biases": (write_zlab, {"attention_bias": True}, "attention_bias"),
    "mla": (write_specforge, {"nested": {"attention_mode": "mla"}}, "attention_mode"),
    "a hybrid": (write_specforge, {"nested": {"attention_modes": ["gqa", "kda"]}}, "attention_mode"),
    "another head": (write_specforge, {"nested": {"projector_type": "dspark"}}, "projector_type"),
    "shifted labels": (write_specforge, {"nested": {"shift_label": True}}, "shift_label"),
    "dfly": (write_angelspec, {"model_arch": "dfly"}, "model_arch='dfly'"),
    "gated": (write_angelspec, {"fusion_type": "gated_sum"}, "fusion_type='gated_sum'"),
    "taps miscounted": (write_angelspec, {"num_target_layers": 6}, "AngelSpec counts taps"),
    "taps not stated": (write_angelspec, {"target_layer_ids": None}, "target_layer_ids is missing"),
    "pruned": (write_angelspec, {"draft_vocab_size": 64}, "draft_vocab_size"),
    "wider target": (write_angelspec, {"target_hidden_size": 64}, "target_hidden_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_drafters_here_do_not_compute_is_refused_by_name(case: str, tmp_path: Path, target: Target) -> None:
    writer, options, told = REFUSED[case]
    arguments = (embedding(target),) if writer is write_angelspec else ()
    folder = writer(tmp_path / "source", *arguments, **options)
    text = refusal(folder)
    assert told in text
    assert text.startswith(f"{folder}: ")


@pytest.mark.parametrize("writer", [write_zlab, write_specforge, write_speculators])
def test_a_mask_vector_beside_any_drafter_is_taken_over(writer: Writer, tmp_path: Path) -> None:
    source = writer(tmp_path / "source")
    torch.save(torch.ones(SHAPE.hidden_size).cumsum(0), source / MASK_FILE)
    vector = torch.load(converted(source, tmp_path / "out") / MASK_FILE, weights_only=True)
    assert torch.equal(vector, torch.ones(SHAPE.hidden_size).cumsum(0).bfloat16())


def test_a_value_of_another_kind_is_one_clear_line(tmp_path: Path) -> None:
    assert "another kind" in refusal(write_speculators(tmp_path / "source", aux_hidden_state_layer_ids=3))


def test_vocabulary_maps_are_refused_whatever_the_configuration_says(tmp_path: Path) -> None:
    folder = write_speculators(tmp_path / "source", tables={"d2t": torch.zeros(96, dtype=torch.int64)})
    assert "d2t" in refusal(folder)


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    folder = write_zlab(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.mlp.down_proj.weight"]
    tensors["markov_head.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors")
    text = refusal(folder)
    assert "layers.1.mlp.down_proj.weight: missing" in text
    assert "markov_head.weight: unexpected" in text


def test_a_folder_of_no_known_style_is_told_what_was_looked_for(tmp_path: Path) -> None:
    folder = tmp_path / "speculators-angelspec"  # a name means nothing
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    text = refusal(folder)
    assert all(style.marks in text for style in STYLES.values())
    assert "LlamaForCausalLM" in text


def test_a_style_is_told_by_what_is_in_the_folder(tmp_path: Path, target: Target) -> None:
    folder = write_angelspec(tmp_path / "speculators", embedding(target))
    assert plan(folder, target=target).source.style.name == "angelspec"
    assert plan(write_specforge(tmp_path / "zlab")).source.style.name == "specforge"
    assert plan(write_zlab(tmp_path / "specforge")).source.style.name == "zlab"


def test_what_a_format_does_not_say_must_be_said_once_and_rightly(tmp_path: Path, target: Target) -> None:
    source = write_angelspec(tmp_path / "source", embedding(target))
    assert "--block-size" in refusal(source, target=target, hints=Hints())
    assert "--num-target-layers" in refusal(write_speculators(tmp_path / "x"), hints=Hints())
    assert "states 6" in refusal(write_zlab(tmp_path / "y"), hints=Hints(num_target_layers=7))


def test_another_target_is_refused(tmp_path: Path, target: Target) -> None:
    larger = replace(target, info=replace(target.info, hidden_size=64, num_layers=7))
    text = refusal(write_zlab(tmp_path / "source", num_target_layers=7), target=larger)
    assert "hidden_size 32 -> 64" in text
    assert "num_target_layers" not in text


def test_types_are_kept_and_rounding_is_said(tmp_path: Path) -> None:
    folder = write_zlab(tmp_path / "source")
    wide = random_tensors(second=True, dtype=torch.float32)
    save_file(wide, folder / "model.safetensors")
    edit_json(folder / "config.json", dtype="float32")
    kept = load_file(converted(folder, tmp_path / "kept") / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in wide.items())
    assert any("rounded to bfloat16" in loss.text for loss in plan(folder, dtype="bfloat16").losses)
    save_file(random_tensors(second=True, dtype=torch.float16), folder / "model.safetensors")
    assert "--dtype" in refusal(folder)
    assert not any("rounded" in loss.text for loss in plan(folder, dtype="float32").losses)
    save_file({**wide, "norm.weight": wide["norm.weight"].bfloat16()}, folder / "model.safetensors")
    assert "bfloat16 and float32" in refusal(folder)


def test_tensors_pass_one_by_one_and_are_dropped(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Tensor]] = []
    read = WeightFiles.__getitem__

    def watched(files: WeightFiles, name: str) -> Tensor:
        assert sum(reference() is not None for reference in seen) <= 1, name  # the one that was just written
        tensor = read(files, name)
        seen.append(weakref.ref(tensor))
        return tensor

    source = write_speculators(tmp_path / "source")
    with monkeypatch.context() as patched:
        patched.setattr(WeightFiles, "__getitem__", watched)
        converted(source, tmp_path / "out", target=target)
    assert len(seen) == len(random_tensors(second=True))


def test_a_quantised_target_gives_no_mask_vector(tmp_path: Path, target: Target) -> None:
    folder = Path(shutil.copytree(target.name, tmp_path / "target"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConvertError, match="I8"):
        open_named_target(str(folder), None)


def test_a_damaged_record_of_the_source_is_one_clear_line(tmp_path: Path) -> None:
    source = write_zlab(tmp_path / "source")
    (source / "run.json").write_text("{")
    with pytest.raises(ConvertError, match=r"run\.json"):
        converted(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_keys_without_a_place_are_listed(tmp_path: Path) -> None:
    found = plan(write_speculators(tmp_path / "source", draft_ffn_type="dense", max_anchors=512))
    assert ["draft_ffn_type='dense': not carried over"] == [x.text for x in found.losses if x.what == "unknown keys"]


def test_a_taken_name_stays_and_a_refused_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = write_zlab(tmp_path / "source")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("precious")
    with pytest.raises(ConvertError, match="exists"):
        converted(source, taken)
    tensors = load_file(source / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConvertError, match=r"fc\.weight"):
        converted(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "taken"}


def test_record_and_provenance_tell_the_source_its_licence_and_its_own_record(tmp_path: Path, target: Target) -> None:
    source = write_zlab(tmp_path / "source")
    (source / "README.md").write_text("---\ntags:\n- dflash\nlicense: cc-by-nc-nd-4.0\n---\n# A drafter\n")
    (source / "run.json").write_text(json.dumps({"made": "elsewhere"}))
    out = converted(source, tmp_path / "out", target=target)
    conversion = json.loads((out / "run.json").read_text())["conversion"]
    assert conversion["source"]["license"] == "cc-by-nc-nd-4.0"
    assert conversion["source"]["record"] == {"made": "elsewhere"}
    assert conversion["source"]["files"] == {
        name: sha256_file(source / name) for name in ("config.json", "model.safetensors")
    }
    text = (out / "PROVENANCE.txt").read_text()
    assert "cc-by-nc-nd-4.0" in text
    assert str(tmp_path) not in text + (out / "run.json").read_text()


@pytest.mark.parametrize("card", ["# no front matter\nlicense: mit\n", "---\ntags: x\n---\nlicense: mit\n", ""])
def test_only_front_matter_states_a_licence(card: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card)
    assert stated_licence(tmp_path) is None


def test_the_card_of_a_conversion_tells_its_source_and_claims_nothing_else(
    foreign: tuple[Path, bool], tmp_path: Path, target: Target
) -> None:
    source, second = foreign
    (source / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    out = converted(source, tmp_path / "out", target=target, hints=HINTS)
    card = (out / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert header["license"] == "cc-by-nc-4.0"
    assert ("dflash2" in header["tags"]) is second
    assert ("| convolution | none |" in card) is not second
    assert "| served by vLLM | not measured |" in card
    assert "| training | not recorded |" in card
    assert sha256_file(source / "model.safetensors") in card
    assert sha256_file(out / "model.safetensors") in card
    assert f"row {MASK_ID} of the target's embedding" in card
    assert "expect fewer accepted tokens" not in card, "its mask slots take the target's row, as every server does"
    assert str(tmp_path) not in card


def test_a_card_says_which_servers_miss_a_trained_mask_vector(tmp_path: Path, target: Target) -> None:
    out = converted(ours(tmp_path / "ours", target), tmp_path / "out", target=target)
    assert "expect fewer accepted tokens" in (out / "README.md").read_text()


def test_a_measurement_goes_into_the_card_of_a_converted_drafter(tmp_path: Path, target: Target) -> None:
    out = converted(write_zlab(tmp_path / "source"), tmp_path / "out", target=target)
    report = write_report(tmp_path / "report.json", out)
    assert len(rewrite_papers(out, [report], repo_id="me/drafter")) == 1
    card = (out / "README.md").read_text()
    assert "| built-in runner | 2.667 (greedy, 1 in flight) |" in card
    assert '"model": "me/drafter"' in card
    assert "acceptance length greedy" in (out / "PROVENANCE.txt").read_text()
    assert [check for check in verify(out) if check.verdict in BAD] == []


def test_a_folder_for_another_tool_gets_no_card_of_this_one(tmp_path: Path, target: Target) -> None:
    out = converted(write_zlab(tmp_path / "source"), tmp_path / "out", "speculators", target)
    assert not (out / "README.md").exists()
    with pytest.raises(UserError, match="another tool's layout"):
        rewrite_papers(out, [])


@pytest.mark.parametrize("to", ["hf", "speculators"])
def test_a_conversion_may_be_written_in_shards(to: str, tmp_path: Path, target: Target) -> None:
    source = write_zlab(tmp_path / "source")
    out = converted(source, tmp_path / "out", to, target, max_shard_gib=12000 / 2**30)
    files = WeightFiles(out)
    assert len(files.paths) > 2
    assert not (out / "model.safetensors").exists()
    back = converted(out, tmp_path / "back", target=target)
    assert load_file(back / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()
    assert [check for check in verify(out) if check.verdict in BAD] == []
    if to == "hf":
        assert check_folder(out, target_info=target.info) == []


def test_the_command_converts_says_what_is_lost_and_refuses_with_exit_2(
    tmp_path: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    source, there = write_zlab(tmp_path / "source"), tmp_path / "there"
    words = ["convert", str(source), str(there), "--to", "speculators", "--target", target.name, "--json"]
    assert dispatch([*words, "--verifier", "owner/name"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["from"], document["to"], document["generation"]) == ("zlab", "speculators", 2)
    assert [loss["what"] for loss in document["losses"]] == ["num_target_layers"]
    assert read_config(there)["speculators_config"]["verifier"]["name_or_path"] == "owner/name"
    assert dispatch(words) == 2
    assert "exists" in capsys.readouterr().err
    assert dispatch(["convert", str(there), str(tmp_path / "back")]) == 2
    assert "--num-target-layers" in capsys.readouterr().err
    assert dispatch(["convert", str(there), str(tmp_path / "back"), "--num-target-layers", "6"]) == 0
    assert "mask vector" in capsys.readouterr().out


def test_the_command_offers_exactly_the_styles_that_there_are() -> None:
    assert sorted(STYLE_NAMES) == sorted(STYLES)
