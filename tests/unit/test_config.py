"""The typed configuration refuses what cannot be run, by key, value and rule."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from dflash2_train.config import ConfigError, load_config, to_plain

COMPLETE: dict[str, Any] = {
    "name": "tiny",
    "target": {"name": "t", "license": "apache-2.0", "hidden_size": 64, "num_layers": 4, "vocab_size": 100},
    "drafter": {
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
        "target_layer_ids": [0, 2],
        "mask_token_id": 99,
        "max_position_embeddings": 128,
    },
    "data": {
        "root": "${run_dir}/data",
        "train_prompts": [{"kind": "starter", "split": "train"}],
        "holdout_prompts": [{"kind": "starter", "split": "holdout"}],
        "sampling": {"max_tokens": 8},
        "max_prompt_tokens": 64,
    },
    "train": {"output_dir": "${run_dir}/train", "steps": 2, "row_tokens": 64, "rows": 1},
    "export": {"output_dir": "${run_dir}/export"},
    "eval": {"output_dir": "${run_dir}/eval", "max_new_tokens": 4},
}


def composed(**changes: Any) -> Any:
    config = OmegaConf.create(COMPLETE)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def test_a_complete_configuration_becomes_typed_objects_with_interpolations_resolved() -> None:
    config = load_config(composed())
    assert config.train.output_dir == "runs/tiny/train"
    assert config.drafter.num_drafted == 7
    assert config.drafter.resolved_layer_types() == ["full_attention"]
    assert to_plain(config)["data"]["sampling"]["top_p"] == 0.95


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("drafter__target_layer_ids", [2, 0], "ascending"),
        ("drafter__target_layer_ids", [0, 0], "unique"),
        ("drafter__target_layer_ids", [0, 4], "below 4"),
        ("drafter__target_layer_ids", [], "at least one tap"),
        ("drafter__mask_token_id", 100, "existing row"),
        ("drafter__block_size", 1, "anchor"),
        ("drafter__conv_group_size", 5, "must divide"),
        ("drafter__num_kv_heads", 0, "positive"),
        ("drafter__num_layers", 0, "positive"),
        ("drafter__selector_rank", 0, "positive"),
        ("drafter__final_logit_softcapping", 0.0, "positive"),
        ("drafter__rope_theta", -1.0, "positive"),
        ("target__num_parameters", -1.0, "positive"),
        ("data__max_num_seqs", 0, "positive"),
        ("data__kv_cache_gib", 0.0, "positive"),
        ("data__gpu_memory_utilization", 1.5, "at most 1"),
        ("eval__top_p", 0.0, "(0, 1]"),
        ("eval__max_prompts", 0, "positive"),
        ("plan__train_seconds_per_step", 0.0, "positive"),
        ("drafter__layer_types", ["linear"], "must be one of"),
        ("drafter__layer_types", ["full_attention"] * 2, "entries"),
        ("drafter__sliding_window", 64, "no layer"),
        ("train__lr", 2.0, "(0, 1)"),
        ("train__dtype", "float16", "must be one of"),
        ("train__attention", "sdpa", "must be one of"),
        ("train__zero_stage", 0, "stage 0"),
        ("train__zero_stage", 3, "0, 1 or 2"),
        ("train__schedule", "step", "must be one of"),
        ("train__ema_decay", 1.0, "(0, 1)"),
        ("train__selector_lr_scale", 0.0, "positive"),
        ("train__betas", [0.9, 1.0], "[0, 1)"),
        ("train__weight_decay", -0.1, "at least 0"),
        ("train__grad_clip", -1.0, "0 never clips"),
        ("train__max_bad_steps", 0, "positive"),
        ("train__max_seconds", -1.0, "at least 0"),
        ("train__num_threads", 0, "positive"),
        ("export__weights", "best", "must be one of"),
        ("loss__kl_kind", "reverse", "must be one of"),
        ("loss__gamma", 0.0, "positive"),
        ("loss__gamma_end", -1.0, "positive"),
        ("loss__kl_kind", "full_vocabulary", "final hidden states"),
        ("loss__position_weights", "uniform", "must be one of"),
        ("loss__missing_candidate", "skip", "must be one of"),
        ("loss__selector_denominator", "none", "must be one of"),
        ("loss__implementation", "cuda", "must be one of"),
        ("loss__dpace_alpha", 1.5, "[0, 1]"),
        ("loss__logit_share", 0.0, "(0, 1]"),
        ("loss__sampled_predecessor", -0.1, "[0, 1]"),
        ("loss__served_anchor_share", 2.0, "[0, 1]"),
        ("loss__served_anchor_hops", 0, "positive"),
        ("train__short_block_random", True, "train.short_block_size"),
        ("data__backend", "tgi", "must be one of"),
        ("data__sampling__top_p", 0.0, "(0, 1]"),
        ("eval__num_drafted", 8, "block_size - 1"),
        ("stage", "everything", "must be one of"),
    ],
)
def test_a_broken_rule_is_refused_naming_key_value_and_rule(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(composed(**{key: value}))
    text = str(caught.value)
    assert key.replace("__", ".") in text
    assert words in text


def test_a_fall_that_does_not_fit_beside_the_warm_up_is_refused() -> None:
    assert load_config(composed(train__schedule="wsd")).train.decay == 0.2
    with pytest.raises(ConfigError, match=r"train\.decay=0\.99"):
        load_config(composed(train__schedule="wsd", train__decay=0.99))


def test_an_unknown_key_is_refused_by_its_full_path() -> None:
    with pytest.raises(ConfigError, match=r"train\.lrr"):
        load_config(composed(train__lrr=1.0))


def test_a_wrong_type_is_refused_by_its_full_path() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr"):
        load_config(composed(train__lr="fast"))


def test_missing_values_are_listed_together() -> None:
    config = OmegaConf.create(COMPLETE)
    del config.train["steps"]
    del config.drafter["num_heads"]
    with pytest.raises(ConfigError, match=r"drafter\.num_heads, train\.steps"):
        load_config(config)


def test_a_run_without_an_experiment_says_how_to_name_one() -> None:
    with pytest.raises(ConfigError, match=r"\+experiment="):
        load_config(OmegaConf.create({"train": {"steps": 3}}))
