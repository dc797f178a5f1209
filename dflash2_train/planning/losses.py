"""Memory of the losses: the chunk of logits, what is kept of every supervised slot, and their backward pass."""

from __future__ import annotations

from dflash2_train.budgets import ROWS_MULTIPLE, chunk_rows, loss_budget, round_up, tile_plan, triton_row_bytes
from dflash2_train.planning.parameters import parameter_sizes
from dflash2_train.planning.setting import Setting
from dflash2_train.planning.timeline import ALWAYS, LOOK, LOSS, Item

FULL, INDEX, DOUBLE = 4, 8, 8  # bytes of fp32, int64 and fp64
GROUP = "loss"


def sweep_budget(setting: Setting) -> int:
    """What a sweep over the supervised slots may hold, as ``losses.sweep.sweep_budget``."""
    shape = setting.shape
    return loss_budget(
        setting.batch.labels,
        shape.hidden_size,
        shape.vocab_size,
        setting.itemsize,
        chunk_bytes=setting.loss.chunk_mib * 2**20,
        logit_share=setting.loss.logit_share,
    )


def chunk_of_logits(setting: Setting) -> tuple[int, int]:
    """Slots whose logits are made at once, and the bytes of these with all that is worked on.

    CPU: tiles of the vocabulary (``losses.tiles``). GPU: whole rows in the training dtype, with maxima of groups of
    logits and the groups that are searched (``losses.pass_triton``).
    """
    shape, e = setting.shape, setting.itemsize
    padded, budget = round_up(setting.batch.labels, ROWS_MULTIPLE), sweep_budget(setting)
    if setting.device == "cpu":
        capped = shape.final_logit_softcapping is not None
        sizes = (padded, shape.vocab_size, shape.hidden_size, e)
        plan = tile_plan(*sizes, budget=budget, capped=capped, on_cpu=True)
        return plan.rows, plan.num_bytes
    row = shape.vocab_size * e + triton_row_bytes(shape.vocab_size, shape.selector_top_k)
    rows = chunk_rows(padded, budget, fixed_bytes=0, bytes_per_row=row)
    return rows, rows * row


def slot_bytes(setting: Setting) -> int:
    """Kept for one supervised slot until the backward pass of the loss.

    e-sized: its state, the state filled up for the selector's projection and the gradient that the sweep left, H each;
    the projected state, r. fp32: predecessor, projected state and their product, r each; logits and scores of the
    candidates with what their cross-entropy keeps, 6 C. int64: candidate ids and labels, C + 4; the teacher's k ids and
    fp32 log-probabilities are copied for the sweep alone.
    """
    shape, e = setting.shape, setting.itemsize
    states = e * (3 * shape.hidden_size + shape.selector_rank) + FULL * 3 * shape.selector_rank
    candidates = shape.selector_top_k * (FULL * 6 + INDEX)
    return states + candidates + INDEX * 4


def backward_bytes(setting: Setting) -> int:
    """The most that the backward pass of the loss takes beside what is kept.

    Three gradients of the states, [N, H] each (sweep, candidates, selector), their sum at its place among all slots,
    [n, H], and the gradient of one codebook [V, r] before it is added to the sum. A GPU makes that from the products of
    all candidates, [N, C, r] in fp32 and in the training dtype.
    """
    shape, batch, e = setting.shape, setting.batch, setting.itemsize
    states = e * shape.hidden_size * (3 * batch.labels + batch.slots)
    codebook = e * parameter_sizes(shape)["candidate_selector.successor_codebook"]
    products = 0
    if setting.device == "cuda":
        products = batch.labels * shape.selector_top_k * shape.selector_rank * (FULL + e)
    return states + codebook + products


def look_bytes(setting: Setting) -> int:
    """When gradient shares are measured: three gradients [N, H], and one of them in fp64 with its squares."""
    if setting.train.gradient_share_every == 0:
        return 0
    return setting.batch.labels * setting.shape.hidden_size * (3 * setting.itemsize + 2 * DOUBLE)


def loss_items(setting: Setting) -> list[Item]:
    """All of it, as lines of the table. On a CPU the chunk stays from step to step."""
    chunk = ALWAYS if setting.device == "cpu" else (LOOK,)
    kept = setting.batch.labels * slot_bytes(setting)
    rows, size = chunk_of_logits(setting)
    return [
        Item(
            group=GROUP,
            name=f"chunk of logits, {rows} slots",
            size=size,
            moments=chunk,
        ),
        Item(group=GROUP, name="supervised slots", size=kept, moments=(LOOK, LOSS)),
        Item(group=GROUP, name="backward of the loss", size=backward_bytes(setting), moments=(LOSS,)),
        Item(group=GROUP, name="gradient of each part", size=look_bytes(setting), moments=(LOOK,)),
    ]
