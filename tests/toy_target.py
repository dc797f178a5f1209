"""A whole target folder in miniature: word tokenizer, chat template, random Llama. Made in well under a second."""

from __future__ import annotations

from pathlib import Path

WORDS = ("<bos>", "<end>", "<user>", "<assistant>", "<think>", "</think>", "<unk>", *(f"w{n}" for n in range(89)))
BOS, END = 0, 1
TEMPLATE = (
    "<bos>{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "<{{ message['role'] }}> {{ message['content'] }} <end>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
PLAIN_TEMPLATE = TEMPLATE.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}", ""
)


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """A tokenizer that itself would add <bos>, so that a doubled one shows."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<end>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(WORDS[2:6])})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def write_model(folder: Path, *, layers: int = 4, tied: bool = False) -> None:
    """A random float32 Llama (H 128, 2 heads of 64, V 96) whose norm weights are far from 1."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=len(WORDS),
        max_position_embeddings=128,
        bos_token_id=BOS,
        eos_token_id=END,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[END])
    model.save_pretrained(folder)
