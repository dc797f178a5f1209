"""Gates over what is written down: manifests, conversations, the target's folder. No tensor is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_gen.cache.conversations import ConversationStore
from data_gen.cache.format import MANIFEST_FILE
from dflash2_train.attest.gate import Gate, judge, unknown
from dflash2_train.provenance import hash_chat_template, hash_tokenizer_files

# Every field that a sampled token depends on.
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_tokens",
    "stop_ids",
    "seed",
)
SHORT = 12  # hex digits of a hash that are shown


@dataclass(kw_only=True)
class Conversations:
    """What the conversations on disk say of themselves."""

    content: dict[str, Any] | None = None  # of their manifest; None where there are none beside the cache
    sources: dict[str, str] = field(default_factory=dict)  # row id -> source
    thinking: Counter[str] = field(default_factory=Counter)  # mode as text -> rows

    @classmethod
    def read(cls, root: Path) -> Conversations:
        """Read ``root``'s manifest and the small columns of every shard."""
        store = ConversationStore(root)
        if not (store.folder / MANIFEST_FILE).exists():
            return cls()
        found = cls(content=store.content())
        for index in store.shards():
            for row in store.read(index, ["row_id", "source", "enable_thinking"]):
                found.sources[row["row_id"]] = row["source"] or "unnamed"
                found.thinking[str(row["enable_thinking"])] += 1
        return found


def record_gates(
    content: dict[str, Any], conversations: Conversations, folder: Path, target_hash: str, enable_thinking: bool | None
) -> list[Gate]:
    """Gates over the records.

    Args:
        content: of the capture manifest.
        conversations: what lies beside it.
        folder: the target's, as this training reads it.
        target_hash: of that folder.
        enable_thinking: the configured mode.
    """
    now = {
        "target_hash": target_hash,
        "tokenizer_hash": hash_tokenizer_files(folder),
        "chat_template_hash": hash_chat_template(folder),
    }
    names = {"target_hash": "target", "tokenizer_hash": "tokenizer", "chat_template_hash": "template"}
    gates = [same_everywhere(names[key], key, content, conversations.content, value) for key, value in now.items()]
    return [*gates, thinking_gate(content, conversations, enable_thinking), sampling_gate(content)]


def same_everywhere(
    name: str, key: str, content: dict[str, Any], conversations: dict[str, Any] | None, now: str | None
) -> Gate:
    """One hash of the target's folder at regeneration, at capture and now."""
    rule = "the same at regenerate, at capture and now"
    recorded = {
        "regenerate": (content if conversations is None else conversations).get(key),
        "capture's copy of it": content.get(key),
        "capture": content.get(f"capture_{key}"),
    }
    known = {place: value for place, value in recorded.items() if value is not None}
    if not known:
        return unknown(name, f"the cache records no {key}", rule)
    known["now"] = now or "none"
    shown = ", ".join(f"{place} {value[:SHORT]}" for place, value in known.items())
    same = len(set(known.values())) == 1
    found = f"{known['now'][:SHORT]} at {', '.join(known)}" if same else shown
    return judge(
        name, same, found, rule, "Point target.name at the folder that the data was made with, or make it anew."
    )


def thinking_gate(content: dict[str, Any], conversations: Conversations, enable_thinking: bool | None) -> Gate:
    """One thinking mode in the configuration, both manifests and every row."""
    modes = [("configuration", str(enable_thinking)), ("capture", str(content.get("enable_thinking")))]
    if conversations.content is not None:
        modes.append(("conversations", str(conversations.content.get("enable_thinking"))))
    modes += [(f"{number:,} rows", mode) for mode, number in sorted(conversations.thinking.items())]
    same = len({mode for _, mode in modes}) == 1
    places = ", ".join(place for place, _ in modes)
    found = f"{enable_thinking} in {places}" if same else ", ".join(f"{place}: {mode}" for place, mode in modes)
    return judge(
        "thinking", same, found, "one mode everywhere", "Set data.enable_thinking to the data's mode, or regenerate."
    )


def sampling_gate(content: dict[str, Any]) -> Gate:
    """Every sampling field of the text is on record."""
    rule = "every field recorded"
    recorded = content.get("sampling")
    if not isinstance(recorded, dict):
        return unknown("sampling", "the cache records no sampling settings", rule)
    missing = [name for name in SAMPLING_FIELDS if name not in recorded]
    found = f"not recorded: {', '.join(missing)}" if missing else _sampling_text(recorded)
    return judge("sampling", not missing, found, rule, "Regenerate, so that the text's settings are known.")


def _sampling_text(recorded: dict[str, Any]) -> str:
    shown = (f"{name} {recorded[name]}" for name in ("temperature", "top_p", "top_k", "max_tokens", "seed"))
    return ", ".join(shown)
