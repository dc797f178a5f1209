"""The real llama.cpp serves the GGUF file: it loads, drafts what our runner drafts, and changes no token.

The target is a tiny Llama written as GGUF here, so that both sides compute with the same fp32 numbers. llama.cpp comes
with Python bindings that ``launch/test.sh --slow`` puts into ``.venv/opt/llama_cpp``, out of everybody else's way; so
the server runs in a process of its own, and this file is both the test and that process.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

OPTIONAL = Path(__file__).resolve().parents[2] / ".venv" / "opt" / "llama_cpp"
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(3, 89) for _ in range(DRAW.randrange(3, 30))] for _ in range(16)]
NEW_TOKENS = 48
END_IDS = frozenset({0, 2})  # <|endoftext|> and <|im_end|>: llama.cpp stops at both
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OPTIONAL.is_dir(), reason="no llama.cpp here; launch/test.sh --slow installs it"),
]


def serve(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers of llama.cpp's own server to the prompts of ``job``, greedily, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(job), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def write_target(model: Any, drafter: Path, path: Path) -> None:
    """The tiny Llama as GGUF, all F32, with the tokenizer of the drafter's file."""
    import gguf

    config = model.config
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_vocab_size(config.vocab_size)
    copy_tokenizer(writer, drafter)
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for index in range(config.num_hidden_layers):
        for here, there in names.items():
            value = state[f"model.layers.{index}.{here}.weight"]
            if there in ("attn_q", "attn_k"):  # llama.cpp rotates neighbouring channels of this architecture
                count = heads if there == "attn_q" else key_heads
                value = value.reshape(count, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape).copy()
            writer.add_tensor(f"blk.{index}.{there}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_tokenizer(writer: Any, source: Path) -> None:
    from dflash2_train.config import GgufConfig, TargetConfig
    from dflash2_train.export.gguf_tokenizer import add_tokenizer

    target = TargetConfig(name="unused", license="", hidden_size=32, num_layers=6, vocab_size=96)
    add_tokenizer(writer, target, GgufConfig(tokenizer_from=str(source)), num_tokens=96, mask_id=95)


def lean_to_the_targets_text(drafter: Any, model: Any) -> None:
    """Point the mask vector at the tokens that the target writes most, so that some of the random drafts are right."""
    import torch

    from dflash2_train.runner.loop import DecodeSettings, plain_decode

    settings = DecodeSettings(max_new_tokens=NEW_TOKENS, num_drafted=3, stop_ids=END_IDS)
    written = Counter(token for prompt in PROMPTS for token in plain_decode(model, prompt, settings).token_ids)
    frequent = [token for token, _ in written.most_common(4)]
    with torch.no_grad():
        drafter.mask_embedding.copy_(4 * model.get_input_embeddings().weight[frequent].sum(0))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Target and drafter on disk, and the modules that they were made from."""
    from dflash2_train.export.gguf_export import export_gguf
    from dflash2_train.export.hf import export_hf
    from tests.cases import RECORD, make_drafter, make_target_info
    from tests.gguf_cases import gguf_config, save_tokenizer
    from tests.tiny_target import save_tiny_llama

    root = tmp_path_factory.mktemp("llama_cpp")
    config = gguf_config(root)
    model = save_tiny_llama(Path(config.target.name), config)
    save_tokenizer(Path(config.target.name), num_tokens=config.target.vocab_size - 6)
    drafter = make_drafter(config)
    lean_to_the_targets_text(drafter, model)
    source = export_hf(drafter, config, make_target_info(config), root / "drafter", run_record=RECORD, dtype="float32")
    config.export.gguf.source = str(source)
    file = export_gguf(config) / "tiny-F32.gguf"
    write_target(model, file, root / "target.gguf")
    return {"root": root, "model": model, "target": str(root / "target.gguf"), "drafter": str(file)}


@pytest.fixture(scope="module")
def speculative(files: dict[str, Any]) -> list[dict[str, Any]]:
    job = {key: files[key] for key in ("target", "drafter")}
    return serve({**job, "prompts": PROMPTS, "tokens": NEW_TOKENS, "drafted": 3})


def test_greedy_output_with_the_drafter_is_the_targets_own(
    files: dict[str, Any], speculative: list[dict[str, Any]]
) -> None:
    plain = serve({"target": files["target"], "drafter": None, "prompts": PROMPTS, "tokens": NEW_TOKENS})
    assert [answer["tokens"] for answer in speculative] == [answer["tokens"] for answer in plain]
    assert sum(len(answer["tokens"]) for answer in plain) > 8 * NEW_TOKENS


def test_llama_cpp_accepts_exactly_the_drafts_that_the_runner_does(
    files: dict[str, Any], speculative: list[dict[str, Any]]
) -> None:
    from dflash2_train.export.hf import load_drafter
    from dflash2_train.runner.loop import DecodeSettings, generate

    drafter = load_drafter(files["root"] / "drafter", "float32").eval()
    settings = DecodeSettings(max_new_tokens=NEW_TOKENS, num_drafted=3, stop_ids=END_IDS)
    results = [generate(files["model"], drafter, prompt, settings) for prompt in PROMPTS]
    assert [answer["tokens"] for answer in speculative] == [result.token_ids for result in results]
    accepted = [counted(result) for result in results]
    assert sum(accepted) >= 10
    assert [answer["accepted"] for answer in speculative] == accepted


def counted(result: Any) -> int:
    """Accepted drafts as llama.cpp counts them: it drafts no further than the length limit leaves room for."""
    total = sum(one.num_accepted for one in result.rounds)
    last = result.rounds[-1]
    return total - max(0, last.num_accepted - last.num_emitted + 1) if result.finish_reason == "length" else total


def run_server(job: dict[str, Any]) -> list[dict[str, Any]]:
    """In the server's process: start llama.cpp on the files, ask it over HTTP, and collect tokens and counters."""
    sys.path.insert(0, str(OPTIONAL))
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = job["target"]
    params.n_ctx, params.n_parallel, params.warmup, params.port = 256, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if job["drafter"] is not None:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = job["drafter"], job["drafted"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    return [ask(server.listening_address, prompt, job["tokens"]) for prompt in job["prompts"]]


def ask(address: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0.0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    timings = answer["timings"]
    return {
        "tokens": answer["tokens"],
        "drafted": timings.get("draft_n", 0),
        "accepted": timings.get("draft_n_accepted", 0),
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(run_server(json.load(sys.stdin))) + "\n")
