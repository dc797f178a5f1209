"""Everything under conf/ composes, types and passes its own rules, through Hydra as a user would reach it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

from data_gen.stage_plan import plan_stage
from data_gen.tiny_target import HIDDEN, VOCAB
from dflash2_train.config import ConfigError
from dflash2_train.export.doctor import check_config
from dflash2_train.model.drafter_config import DrafterShape
from tests.families import CONF, EXPERIMENTS, load

SCALES = sorted(path.stem for path in (CONF / "scale").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_passes_its_rules(experiment: str) -> None:
    assert load(f"+experiment={experiment}").name == experiment


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_changes_the_newcomers_run_and_its_folder(scale: str) -> None:
    base, scaled = load("+experiment=smollm2_cpu"), load("+experiment=smollm2_cpu", f"+scale={scale}")
    assert scaled.train.steps != base.train.steps
    assert scaled.run_dir != base.run_dir


def test_the_command_line_wins_over_the_experiment() -> None:
    assert load("+experiment=smollm2_cpu", "train.steps=7").train.steps == 7


def test_the_flagship_recipe_is_as_designed() -> None:
    config = load("+experiment=glm53_flash")
    assert config.drafter.num_layers == 8
    assert config.drafter.target_layer_ids == [5, 9, 14, 19, 24, 28, 33, 38, 42]
    assert (config.drafter.block_size, config.drafter.mask_token_id) == (8, 154856)
    assert (config.loss.gamma, config.data.teacher_top_k) == (6.5, 20)
    assert (config.data.sampling.temperature, config.data.sampling.top_p) == (1.0, 0.95)


def test_the_small_flagship_slides_everywhere_and_shares_the_rest() -> None:
    full, sliding = load("+experiment=glm53_flash"), load("+experiment=glm53_flash_swa")
    assert sliding.drafter.resolved_layer_types() == ["sliding_attention"] * 5
    assert (sliding.drafter.sliding_window, sliding.drafter.block_size) == (2048, 8)
    assert sliding.drafter.target_layer_ids == [5, 14, 24, 33, 42]
    assert (sliding.target, sliding.loss, sliding.data.sampling) == (full.target, full.loss, full.data.sampling)
    assert sliding.run_dir != full.run_dir


def test_the_recipe_of_the_large_target_is_as_designed() -> None:
    config = load("+experiment=glm53")
    target, drafter = config.target, config.drafter
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (6144, 78, 154880)
    assert drafter.resolved_layer_types() == ["sliding_attention"] * 4 + ["full_attention"]
    assert (drafter.num_heads, drafter.num_kv_heads, drafter.head_dim) == (64, 16, 128)
    assert (drafter.block_size, drafter.target_layer_ids) == (12, [1, 20, 38, 56, 75])
    assert config.train.anchors_per_document == 128
    assert config.export.resolved_num_proposals(drafter) == config.eval.num_drafted == 8


def test_the_dense_target_has_a_mask_token_beyond_its_tokenizer() -> None:
    config = load("+experiment=qwen3_8b")
    assert (config.target.hidden_size, config.target.num_layers, config.target.vocab_size) == (4096, 36, 151936)
    assert 151669 <= config.drafter.mask_token_id < config.target.vocab_size
    assert config.export.resolved_num_proposals(config.drafter) == 7


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_published_config_of_every_experiment_breaks_no_rule(experiment: str) -> None:
    config = load(f"+experiment={experiment}")
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    assert check_config(DrafterShape.from_config(config).to_published("bfloat16", **ids)) == []


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name != "smollm2_cpu"])
def test_every_large_recipe_is_planned_before_anything_is_read(experiment: str, tmp_path: Path) -> None:
    plan = plan_stage(load(f"+experiment={experiment}", f"run_dir={tmp_path}"))
    assert all(stage.hours is not None and stage.hours > 0 for stage in plan.stages)
    assert all(fit.verdict in ("fits", "does not fit") for fit in plan.fits if fit.available is not None)
    assert (tmp_path / "plan.json").exists()


SEVEN = [
    "ultrachat_200k",
    "OpenR1-Math-220k",
    "OpenMathReasoning",
    "OpenScienceReasoning-2",
    "OpenCodeReasoning",
    "OpenCodeInstruct",
    "evol-codealpaca-v1",
]


def test_every_data_group_fits_the_flagship_and_every_source_names_its_licence() -> None:
    for path in (CONF / "data").glob("*.yaml"):
        data = load("+experiment=glm53_flash", f"data={path.stem}").data
        for source in [*data.train_prompts, *data.holdout_prompts, *data.evaluation_prompts]:
            assert source.kind == "jsonl" or source.license, f"{path.stem}: {source.path}"


def test_the_flagship_mix_has_its_seven_sources_and_keeps_the_benchmarks_out() -> None:
    data = load("+experiment=glm53_flash").data
    assert [source.name for source in data.train_prompts] == SEVEN
    assert [source.max_prompts for source in data.holdout_prompts] == [190, 162, 148]
    assert {source.name for source in data.evaluation_prompts} == {"GSM8K", "MATH-500", "HumanEval", "MBPP", "MT-Bench"}
    assert data.max_prompts is not None
    weight = sum(source.weight or 0 for source in data.train_prompts)
    for source in data.train_prompts:
        assert (source.max_prompts or 0) > data.max_prompts * (source.weight or 0) / weight, source.name


def test_the_larger_mix_begins_with_the_flagships_and_notes_what_is_gated() -> None:
    base, plus = (load("+experiment=glm53_flash", f"data={name}").data for name in ("glm53_flash", "glm53_flash_plus"))
    assert plus.train_prompts[: len(SEVEN)] == base.train_prompts
    assert plus.holdout_prompts == base.holdout_prompts
    gated = {source.path for source in plus.train_prompts if "gated" in source.terms.split(";")[0].split()}
    assert gated == {
        "lmsys/lmsys-chat-1m",
        "Salesforce/xlam-function-calling-60k",
        "nvidia/Nemotron-Post-Training-Dataset-v2",
    }


def test_a_key_added_with_a_plus_is_refused_when_the_schema_lacks_it() -> None:
    with pytest.raises(ConfigError, match=r"train\.lrr"):
        load("+experiment=smollm2_cpu", "+train.lrr=1")


def test_a_misspelt_key_or_experiment_is_refused_by_name() -> None:
    with pytest.raises(ConfigCompositionException, match="lrr"):
        load("+experiment=smollm2_cpu", "train.lrr=1")
    with pytest.raises(ConfigCompositionException, match="experiment/nope"):
        load("+experiment=nope")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_tiny_scale_keeps_what_makes_an_experiment_and_shrinks_the_rest(experiment: str) -> None:
    whole, tiny = load(f"+experiment={experiment}"), load(f"+experiment={experiment}", "+scale=tiny")
    for key in ("num_layers", "block_size", "target_layer_ids", "layer_types", "conv_kernel_size", "selector_top_k"):
        assert vars(tiny.drafter)[key] == vars(whole.drafter)[key]
    assert tiny.target.num_layers == whole.target.num_layers
    assert tiny.target.architecture == whole.target.architecture is not None
    assert (tiny.loss, tiny.train.dtype, tiny.train.zero_stage) == (
        whole.loss,
        whole.train.dtype,
        whole.train.zero_stage,
    )
    assert tiny.data.enable_thinking == whole.data.enable_thinking
    assert (tiny.target.hidden_size, tiny.target.vocab_size) == (HIDDEN, VOCAB)
    assert tiny.target.hidden_size < whole.target.hidden_size
    assert tiny.run_dir != whole.run_dir
    assert tiny.target.architecture in tiny.target.setup
