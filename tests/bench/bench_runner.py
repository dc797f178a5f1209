"""CPU time of a decoding cycle: this runner beside the reference runner (PyPI dflash) and plain decoding.

``python -m tests.bench.bench_runner EXPORTED_DRAFTER [--target targets/SmolLM2-135M-Instruct] [--new-tokens 64]
[--prompts 2] [--dtype float32] [--threads 1] [--json FILE] [--markdown FILE]``

Every decoder gets the same target, drafter and prompts, greedily, one prompt at a time. Figures are CPU seconds of the
process, which other users of the machine disturb least; with one thread they are also the time that a user waits on an
idle machine. A cycle is one draft and one verification. ``draft`` and ``verify`` are what the drafter (with its
context, head and selector) and the target's forward take, measured around the calls in the same way for both runners;
``other`` is the rest of the decoding. The prefill is left out. The reference ignores the drafter's learned mask
vector, so that it accepts less and takes more cycles; the figures are by cycle.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dflash.model as reference
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from dflash2_train.export.hf import load_drafter
from dflash2_train.pretrained import load_pretrained
from dflash2_train.provenance import machine
from dflash2_train.runner import DecodeSettings, generate, outcome, plain_decode
from dflash2_train.runner.packing import packed_linears
from dflash2_train.runner.propose import DraftProposer

QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 120 km in one and a half hours. What is its average speed?",
    "Name three uses of copper and say why it suits each.",
)
WARM_UP_TOKENS = 10
LONGEST_BLOCK = 16  # every prompt is longer


@dataclass(kw_only=True)
class Figures:
    """CPU seconds of one decoder over all prompts."""

    decoder: str
    tokens: int = 0  # after each prompt's first
    cycles: int = 0  # verifications, or plain tokens
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """What neither forward took."""
        return self.total - self.draft - self.verify


class Meter:
    """Adds up the CPU time spent inside some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def method(self, owner: Any, name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> Iterator[None]:
        """Measure the calls of ``owner.name`` whose arguments ``counts``, while the context is open."""
        inner = vars(owner).get(name)  # an own attribute, or a function of the class
        function = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            if counts(*args, **kwargs):
                self.seconds += time.process_time() - start
            return result

        setattr(owner, name, measured)
        try:
            yield
        finally:
            delattr(owner, name)
            if inner is not None:
                setattr(owner, name, inner)


def is_block(ids: Tensor | None = None, **inputs: Any) -> bool:
    """Whether a forward of the target verifies a block and is no prompt."""
    given: Tensor = inputs["input_ids"] if ids is None else ids
    return given.shape[1] <= LONGEST_BLOCK


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all decoders share."""

    target: PreTrainedModel
    folder: Path
    dtype: str
    prompts: list[list[int]]
    new_tokens: int
    stop_ids: list[int]

    def settings(self, num_drafted: int, new_tokens: int) -> DecodeSettings:
        return DecodeSettings(max_new_tokens=new_tokens, num_drafted=num_drafted, stop_ids=frozenset(self.stop_ids))


def measure_ours(bench: Bench, *, packed: bool) -> Figures:
    """This runner."""
    drafter = load_drafter(bench.folder, bench.dtype).eval()
    num_drafted = drafter.shape.block_size - 1
    figures = Figures(decoder="this runner, packed" if packed else "this runner")
    draft, verify = Meter(), Meter()
    with ExitStack() as stack:
        stack.enter_context(packed_linears(bench.target, drafter) if packed else nullcontext())
        generate(bench.target, drafter, bench.prompts[0], bench.settings(num_drafted, WARM_UP_TOKENS))
        for name in ("start", "observe", "propose"):
            stack.enter_context(draft.method(DraftProposer, name))
        stack.enter_context(verify.method(bench.target, "forward", is_block))
        for prompt in bench.prompts:
            result = generate(bench.target, drafter, prompt, bench.settings(num_drafted, bench.new_tokens))
            figures.tokens += len(result.token_ids) - 1
            figures.cycles += len(result.rounds)
            figures.total += result.timings.decode
    figures.draft, figures.verify = draft.seconds, verify.seconds
    return figures


def measure_reference(bench: Bench) -> Figures:
    """dflash's own generate."""
    model = reference.DFlash2DraftModel.from_pretrained(bench.folder, dtype=getattr(torch, bench.dtype)).eval()
    figures = Figures(decoder="dflash 0.1.0")
    draft, verify = Meter(), Meter()

    def run(prompt: list[int], new_tokens: int) -> Any:
        return reference.dflash_generate(
            model, bench.target, torch.tensor([prompt]), new_tokens, bench.stop_ids, return_stats=True
        )

    run(bench.prompts[0], WARM_UP_TOKENS)
    with ExitStack() as stack:
        stack.enter_context(draft.method(model, "forward"))
        stack.enter_context(draft.method(model, "propose"))
        stack.enter_context(verify.method(bench.target, "forward", is_block))
        for prompt in bench.prompts:
            result = run(prompt, bench.new_tokens)
            figures.tokens += result.num_output_tokens - 1
            figures.cycles += len(result.acceptance_lengths)
            figures.total += result.time_per_output_token * result.num_output_tokens
    figures.draft, figures.verify = draft.seconds, verify.seconds
    return figures


def measure_plain(bench: Bench, *, packed: bool) -> Figures:
    """This runner without a drafter."""
    figures = Figures(decoder="plain, this runner, packed" if packed else "plain, this runner")
    with packed_linears(bench.target) if packed else nullcontext():
        plain_decode(bench.target, bench.prompts[0], bench.settings(1, WARM_UP_TOKENS))
        for prompt in bench.prompts:
            result = plain_decode(bench.target, prompt, bench.settings(1, bench.new_tokens))
            figures.tokens += len(result.token_ids) - 1
            figures.verify += result.timings.verify
            figures.total += result.timings.decode
    figures.cycles = figures.tokens
    return figures


def measure_transformers(bench: Bench) -> Figures:
    """transformers' generate."""
    figures = Figures(decoder="plain, transformers")

    def run(prompt: list[int], new_tokens: int) -> tuple[int, float]:
        start = time.process_time()
        ids = bench.target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=bench.stop_ids,
            pad_token_id=bench.stop_ids[0],
        )
        return ids.shape[1] - len(prompt), time.process_time() - start

    run(bench.prompts[0], WARM_UP_TOKENS)
    for prompt in bench.prompts:
        first, long = run(prompt, 1), run(prompt, bench.new_tokens)
        figures.tokens += long[0] - 1
        figures.total += long[1] - first[1]
    figures.cycles, figures.verify = figures.tokens, figures.total
    return figures


def show(rows: list[Figures], threads: int, dtype: str) -> None:
    """The table."""
    table = Table(title=f"CPU ms a cycle, {dtype}, {threads} thread(s)")
    for name in ("decoder", "tokens", "cycles", "tokens a cycle", "draft", "verify", "other", "cycle", "ms a token"):
        table.add_column(name, justify="left" if name == "decoder" else "right")
    for row in rows:
        ms = [1000 * value / row.cycles for value in (row.draft, row.verify, row.other, row.total)]
        table.add_row(
            row.decoder,
            str(row.tokens),
            str(row.cycles),
            f"{row.tokens / row.cycles:.2f}",
            *(f"{value:.1f}" for value in ms),
            f"{1000 * row.total / row.tokens:.1f}",
        )
    Console(width=130).print(table)


def markdown(rows: list[Figures], threads: int, dtype: str, machine: str) -> str:
    """The table for a README: milliseconds by cycle, and both targets of the runner, against the first row."""
    first = rows[0]
    lines = [
        f"CPU milliseconds of a cycle, {dtype}, {threads} thread(s), {machine}, torch {torch.__version__}:",
        "",
        "| decoder | tokens a cycle | draft | verify | other | cycle | against the reference | ms a token |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        draft, verify, other, cycle = (
            f"{1000 * value / row.cycles:.1f}" for value in (row.draft, row.verify, row.other, row.total)
        )
        speculates = row.draft > 0
        ratio = f"{row.total / row.cycles / (first.total / first.cycles):.2f}x" if speculates else ""
        share = f" ({100 * row.other / row.total:.1f}%)" if speculates else ""
        per_token = f"{1000 * row.total / row.tokens:.1f}"
        drafted = draft if speculates else ""
        cells = (row.decoder, f"{row.tokens / row.cycles:.2f}", drafted, verify, other + share, cycle, ratio, per_token)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every decoder once and print the table."""
    parser = argparse.ArgumentParser(description="CPU time of a decoding cycle")
    parser.add_argument("drafter", type=Path, help="exported drafter folder")
    parser.add_argument("--target", default="targets/SmolLM2-135M-Instruct")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=2, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the raw figures here")
    parser.add_argument("--markdown", type=Path, help="also write the table for a README here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    outcome.now = time.process_time
    reference._cuda_time = time.process_time
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = load_pretrained(options.target, getattr(torch, options.dtype))
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS[: options.prompts]]
    bench = Bench(
        target=target,
        folder=options.drafter,
        dtype=options.dtype,
        prompts=[list(tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"]) for one in chats],
        new_tokens=options.new_tokens,
        stop_ids=[tokenizer.eos_token_id],
    )
    rows = [
        measure_reference(bench),
        measure_ours(bench, packed=False),
        measure_ours(bench, packed=True),
        measure_plain(bench, packed=False),
        measure_plain(bench, packed=True),
        measure_transformers(bench),
    ]
    show(rows, options.threads, options.dtype)
    hardware = machine()
    text = markdown(rows, options.threads, options.dtype, f"{hardware['cpu']}, {hardware['cores']} cores")
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    Console(width=200).print(f"\n{text}", highlight=False, markup=False)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
