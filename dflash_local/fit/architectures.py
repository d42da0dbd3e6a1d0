"""llama.cpp's abilities by a target's architecture. Names are those of `llama-arch.cpp`."""

from dataclasses import dataclass
from typing import Literal

WayBackKind = Literal["cells", "replay", "snapshots"]

# In the graphs of these (in llama.cpp's src/models) the output of a layer is called `l_out`, and is
# passed on unchanged under that name as the input of the next layer. That is what is tapped. (To
# rows of images, qwen3vl adds something to the first few, which no drafter sees.) The
# others differ: several parallel streams (gemma3n, hy_v4, deepseek4), a norm between loops
# (nanbeige), layers without an output (deci), another name (step35, nemotron_h).
TAPPED_ARCHITECTURES = frozenset({
    "afmoe", "apertus", "arcee", "bailingmoe", "bailingmoe2", "bailingmoe3", "chatglm",
    "cohere2", "cohere2moe", "command-r", "dbrx", "deepseek", "deepseek2", "dots1", "ernie4_5",
    "ernie4_5-moe", "exaone", "exaone-moe", "exaone4", "falcon", "gemma", "gemma2", "gemma3",
    "gemma4", "glm4", "glm4moe", "gpt-oss", "granite", "granitemoe", "grok", "hunyuan-dense",
    "hunyuan-moe", "hunyuan_vl", "internlm2", "kimi-linear", "lfm2", "lfm2moe", "llama",
    "llama4", "mimo2", "minicpm", "minicpm3", "minimax-01", "minimax-m2", "mistral3",
    "mistral4", "muse-glimmer", "nemotron", "olmo", "olmo2", "olmoe", "phi2", "phi3", "phimoe",
    "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next",
    "qwen3vl", "qwen3vlmoe", "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip

# Their files may have heads, layers that predict further tokens (`nextn`), and llama.cpp has a
# context for these, which the tests have tried.
HEADS_ARCHITECTURES = frozenset({
    "bailingmoe3", "deepseek2", "deepseek32", "glm-dsa", "glm4moe", "mimo2", "nemotron_h_moe",
    "qwen35", "qwen35moe", "qwen3next", "step35",
})  # fmt: skip

# Our own graph computes the heads of these: attention, and a dense layer or a mixture
# (native/heads_graph.cpp).
GRAPHED_HEADS = frozenset({"glm4moe", "qwen35", "qwen35moe", "qwen3next"})

# llm_arch_is_recurrent and llm_arch_is_hybrid: a state stands for all tokens of a sequence
RECURRENT_ARCHITECTURES = frozenset({
    "arwkv7", "bailingmoe3", "deepseek4", "falcon-h1", "glm5-next", "granitehybrid", "jamba",
    "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "minimax-01", "nemotron_h",
    "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "rwkv6",
    "rwkv6qwen2", "rwkv7",
})  # fmt: skip

# Of these llama.cpp keeps snapshots of the state, one after each row (those in
# llm_arch_supports_rs_rollback without a memory of their own), and the tests have shown that they
# are exact.
SNAPSHOT_ARCHITECTURES = frozenset({
    "bailingmoe3", "kimi-k3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35",
    "qwen35moe",
})  # fmt: skip

# Gated delta nets, Kimi's, and short convolutions: the rows that stay are computed into the state
# once more, which takes no snapshots (native/state_replay.cpp). Where that cannot be done, there
# may be snapshots.
REPLAY_ARCHITECTURES = frozenset({
    "bailingmoe3", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe", "qwen35", "qwen35moe", "qwen3next",
})  # fmt: skip

# Their states are kept in llama.cpp by code of their own, which was not tried: they have no
# checkpoints.
OWN_STATE_ARCHITECTURES = frozenset({"deepseek4", "glm5-next", "qwen4exp"})

# These make vectors of texts: encoders, without a cache of keys and values.
EMBEDDING_ARCHITECTURES = frozenset({
    "bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed",
    "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe",
})  # fmt: skip

# All their models are mixtures of experts, among those that have a name here.
MIXTURES = frozenset({
    "deepseek2", "glm-dsa", "gpt-oss", "lfm2moe", "mimo2", "minimax-m2", "qwen35moe", "qwen3moe",
    "qwen3next",
})  # fmt: skip

# These do not write text one token after the other.
NOT_GENERATIVE_ARCHITECTURES = EMBEDDING_ARCHITECTURES | frozenset({
    "clip", "eagle3", "gemma4-assistant", "pockettts", "qwen3tts", "t5", "t5encoder",
    "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1",
})  # fmt: skip


@dataclass(frozen=True)
class WayBack:
    """A target's way to take rejected rows back, and the most `rows` of a recurrent sequence's last
    pass that it takes back. "cells" frees cells, which is all that attention needs, and no way back
    for a recurrent state. "snapshots" needs a further state in memory for each row."""

    kind: WayBackKind = "cells"
    rows: int = 0

    def by(self, kind: WayBackKind) -> int:
        """The rows that are taken back in this way."""
        return self.rows if self.kind == kind else 0


CELLS = WayBack()


def way_back(architecture: str) -> WayBackKind | None:
    """The way in which rejected tokens are taken back: their cells are freed, if all layers are
    attention's; a recurrent state is computed again from the rows that stay, or goes back to a
    snapshot after any of the last rows. None: they cannot be."""
    if architecture not in RECURRENT_ARCHITECTURES:
        return "cells"
    if architecture in REPLAY_ARCHITECTURES:
        return "replay"
    return "snapshots" if architecture in SNAPSHOT_ARCHITECTURES else None


def rolls_back(architecture: str) -> bool:
    """Whether rejected tokens can be taken back."""
    return way_back(architecture) is not None


def takes_drafters(architecture: str) -> bool:
    """Whether drafts can be made for such a target: its layers can be tapped, and rejected tokens
    taken back."""
    return architecture in TAPPED_ARCHITECTURES and rolls_back(architecture)
