"""Tokenizers in the layouts that their makers publish them in."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from gguf import TokenType

from dflash_local.convert.files.source import Source
from dflash_local.convert.tokenizer.pretokenizers import FAMILIES
from dflash_local.gguf.file import GgufFile

# name to content: bytes as they are, the rest as JSON
Files = dict[str, Any]


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]}


def hf_files(target: GgufFile) -> Files:
    """The tokenizer of `target` in the layout of Qwen3's repository."""
    data = target.metadata
    tokens, kinds = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    special = [number for number, kind in enumerate(kinds) if kind == TokenType.CONTROL]
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False}
    return {
        "config.json": {"model_type": "qwen3", "vocab_size": len(tokens), "eos_token_id": 8184},
        "tokenizer.json": {
            "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special],
            "pre_tokenizer": split_by(FAMILIES["qwen3"].pattern),
            "decoder": {"type": "ByteLevel"},
            "model": {
                "type": "BPE",
                "vocab": {text: i for i, text in enumerate(tokens) if i not in special},
                "merges": [merge.split(" ") for merge in data["tokenizer.ggml.merges"]],
            },
        },
        "tokenizer_config.json": {
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": tokens[data["tokenizer.ggml.eos_token_id"]],
            "pad_token": {"content": tokens[data["tokenizer.ggml.padding_token_id"]]},
            "additional_special_tokens": [tokens[i] for i in special],
            "chat_template": data["tokenizer.chat_template"],
            "added_tokens_decoder": {str(i): {"content": tokens[i], **flags} for i in special},
        },
    }


def rank_files() -> Files:
    """Kimi's layout: all bytes, and a few longer tokens."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"he", b"ll", b"hell", b"hello", b" w", "\u4f60".encode()[:2], "\u4f60".encode()]
    lines = [base64.b64encode(token) + b" %d" % i for i, token in enumerate(tokens)]
    first = len(tokens)
    return {
        "config.json": {
            "model_type": "kimi_k25",
            "text_config": {"bos_token_id": first, "eos_token_id": first + 1},
        },
        "tiktoken.model": b"\n".join(lines) + b"\n",
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                str(first): {"content": "[BOS]", "special": True},
                str(first + 1): {"content": "[EOS]", "special": True},
            }
        },
        "chat_template.jinja": b"{{ messages }}",
    }


def gemma4_files() -> Files:
    texts = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<|channel>", "<|image|>"]
    special = list(texts)
    texts += [f"<0x{byte:02X}>" for byte in range(256)]
    texts += ["\u2581", "h", "i", "hi", "\u2581hi", "\n"]
    return {
        "config.json": {"model_type": "gemma4"},
        "tokenizer.json": {
            "added_tokens": [
                {"id": i, "content": text, "special": True} for i, text in enumerate(special)
            ],
            "model": {
                "type": "BPE",
                "byte_fallback": True,
                "vocab": {text: i for i, text in enumerate(texts)},
                "merges": [["h", "i"], ["\u2581", "hi"]],
            },
        },
        "tokenizer_config.json": {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "soc_token": "<|channel>",
            "model_specific_special_tokens": {"sot_token": "<|turn>"},
            "extra_special_tokens": ["<|image|>"],
        },
    }


def source(folder: Path, files: Files) -> Source:
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(raw)
    return Source(folder, folder.name, None, {})
