"""What a run is about: whether the server fits it, and the conditions that its record states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash2_train.config import RunConfig, absolute
from dflash2_train.evaluate.server.connection import ServerError
from dflash2_train.evaluate.server.messages import ServerFacts
from dflash2_train.evaluate.subject import drafter_record
from dflash2_train.export.evaluations import thinking_notes
from dflash2_train.provenance import sha256_file

DRAFTER_WEIGHTS = "model.safetensors"


def check_speculation(config: RunConfig, facts: ServerFacts) -> None:
    """Hold what the server drafts against what the run is about, before anything is measured.

    Raises:
        ServerError: speculation where none is expected or the reverse, another K than configured, or a K for which the
            drafter was not trained.
    """
    server, drafted = config.eval.server, facts.num_drafted
    if server.method == "autoregressive":
        if drafted is not None:
            raise ServerError(
                f"{server.url}: speculates with K={drafted}, though eval.server.method=autoregressive. Start it "
                "without speculation, or name the method."
            )
        return
    if drafted is None:
        raise ServerError(
            f"{server.url}: does not speculate, though eval.server.method={server.method}. Start it with its "
            "speculative options, or set eval.server.method=autoregressive for a baseline."
        )
    trained = config.drafter.num_drafted
    if server.method == "drafter" and drafted > trained:
        raise ServerError(
            f"{server.url}: drafts K={drafted}; the drafter's block_size {config.drafter.block_size} trained {trained} "
            f"positions. Start the server with {trained} speculative tokens at most."
        )
    if config.eval.num_drafted is not None and drafted != config.eval.num_drafted:
        raise ServerError(
            f"{server.url}: drafts K={drafted}, eval.num_drafted={config.eval.num_drafted}. Start the server with "
            f"{config.eval.num_drafted} speculative tokens, or leave eval.num_drafted null."
        )


def describe(config: RunConfig, facts: ServerFacts) -> dict[str, Any]:
    """All that shapes the figures, as JSON values; likeness of runs is judged by it."""
    settings, server = config.eval, config.eval.server
    sampled = settings.temperature > 0
    caching = {True: "on", False: "off", None: "not told"}[facts.prefix_caching]
    if facts.prefix_caching and server.cold_prefix_cache:
        caching = "on, kept cold"
    return {
        "experiment": config.name,
        "mode": settings.mode,
        "engine": f"{facts.engine} {facts.version or '(version not told)'}",
        "hardware": server.hardware or facts.hardware,
        "method": server.method,
        "target": config.target.name,
        "served_model": facts.model,
        "drafter_sha256": _declared_drafter(config),
        "num_drafted": facts.num_drafted,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p if sampled else None,
        "top_k": settings.top_k if sampled else None,
        "min_p": settings.min_p if sampled else None,
        "seed": None,  # not sent: batches of changing shape do not repeat, and seeded sampling is slower
        "ignore_eos": False,
        "enable_thinking": config.data.enable_thinking,
        "template": server.template,
        "prefix_caching": caching,
        "concurrency": list(server.concurrency),
        "warm_up": {"requests": server.warm_up or "as many as in flight", "tokens": server.warm_up_tokens},
        "tries": server.tries,
        "timeout_s": server.timeout_s,
        "flags": server.flags or facts.flags,
    }


def _declared_folder(config: RunConfig) -> Path:
    """The export that the server was started with, as far as the experiment knows."""
    return absolute(config.eval.drafter or config.export.output_dir)


def _declared_drafter(config: RunConfig) -> str | None:
    """Hash of the weights that the experiment exported; servers do not tell what they loaded."""
    if config.eval.server.method != "drafter":
        return None
    weights = _declared_folder(config) / DRAFTER_WEIGHTS
    return sha256_file(weights) if weights.is_file() else None


def run_labels(config: RunConfig, facts: ServerFacts) -> list[str]:
    """What a reader must know about the whole run."""
    labels = []
    if not (config.eval.server.hardware or facts.hardware):
        labels.append("hardware not recorded: set eval.server.hardware")
    if config.eval.server.method == "drafter" and config.eval.num_drafted is None:
        trained = config.drafter.num_drafted
        if facts.num_drafted is not None and facts.num_drafted < trained:
            labels.append(f"K={facts.num_drafted}; the drafter was trained for {trained}")
    if config.eval.server.method == "drafter":
        labels += thinking_notes(drafter_record(_declared_folder(config)), config.data.enable_thinking)
    return labels
