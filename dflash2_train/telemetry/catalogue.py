"""Every name that the trainer writes to ``metrics.jsonl``, with unit and meaning. The guide's table is made from it.

Names stay as they are from version to version. ``{k}`` stands for a slot 1..K, ``{group}`` for a group of
``optimizer.py``, ``{part}`` for ce, kl or selector. W&B and TensorBoard get the same names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One name, or a family of names."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether ``name`` is this metric or one of its family."""
        pattern = re.escape(self.name).replace(r"\{k\}", r"slot[1-9]\d*")
        return re.fullmatch(re.sub(r"\\\{\w+\\\}", r"\\w+", pattern), name) is not None


def _metric(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, meaning=meaning)


METRICS = (
    _metric("step", "", "windows done, dropped ones included"),
    _metric("attempt", "", "start of the run that wrote the line; of one step the latest counts"),
    _metric("epoch", "", "passes over the data that are finished"),
    _metric("seconds", "s", "training time over all attempts"),
    _metric("loss", "nats", "what is minimised, with its weights and the selector's full weight"),
    _metric("ce", "nats", "cross-entropy of the drafter on the text, weighted over slots"),
    _metric("kl", "nats", "divergence from the teacher (`loss.kl_kind`), weighted over slots"),
    _metric("selector", "nats", "the selector's cross-entropy, over the weight of all slots: misses count 0"),
    _metric("selector_share", "share", "weight of the slots that the selector is trained on"),
    _metric("ce/{k}", "nats", "mean cross-entropy at slot k"),
    _metric("kl/{k}", "nats", "mean divergence at slot k"),
    _metric("selector/{k}", "nats", "mean of the selector at slot k, over the slots it is trained on"),
    _metric("top1", "share", "slots whose best unary logit is the text's token"),
    _metric("top1/{k}", "share", "the same at slot k"),
    _metric("recall", "share", "slots whose candidates hold the text's token"),
    _metric("recall/{k}", "share", "the same at slot k"),
    _metric("overlap", "probability", "sum of min(p, q) over the teacher's top-k: a floor of sampled acceptance"),
    _metric("selector_path", "tokens", "drafts accepted a block, greedy, walked by the selector; length is 1 more"),
    _metric("unary_path", "tokens", "the same for the best unary logit of each slot"),
    _metric("accepted/{k}", "share", "walked blocks whose drafts are accepted up to slot k"),
    _metric("lr", "", "rate of the first optimizer group at the next step"),
    _metric("lr/{group}", "", "rate of an optimizer group at the next step"),
    _metric("grad_norm", "", "norm of the whole gradient before clipping; absent where it is not finite"),
    _metric("gradient_norm/{part}", "", "norm of a loss part's gradient by the states that leave the drafter"),
    _metric("gradient_share/{part}", "share", "that norm over the sum of the parts' norms"),
    _metric("mask_embedding/norm", "", "norm of the learned mask vector"),
    _metric("mask_embedding/ratio", "", "that norm over the median norm of the embedding table's rows"),
    _metric("dropped", "windows", "so far, because a loss or gradient was not finite"),
    _metric("tokens_per_second", "1/s", "context tokens, padding left out, all ranks"),
    _metric("blocks_per_second", "1/s", "blocks, all ranks"),
    _metric("tflops", "1e12/s", "model operations (`flops.py`) a device"),
    _metric("utilisation", "share", "of the device's dense peak, by model operations; absent where no peak is known"),
    _metric("hardware_utilisation", "share", "the same with layers that are computed again"),
    _metric("data_wait", "share", "of the time that ranks stood still for want of data, mean over ranks"),
    _metric("memory/rss", "GiB", "resident size of the first rank's process"),
    _metric("memory/rss_peak", "GiB", "its largest so far"),
    _metric("memory/cuda_allocated_peak", "GiB", "largest so far in tensors, first rank, CUDA only"),
    _metric("memory/cuda_reserved_peak", "GiB", "largest so far held by the allocator, first rank, CUDA only"),
)


def described(name: str) -> Metric | None:
    """The entry of a name, or None for one that is not the trainer's own."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def markdown_table() -> str:
    """The catalogue as the table of the guide."""
    lines = ["| name | unit | meaning |", "|---|---|---|"]
    lines += [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS]
    return "\n".join(lines)
