"""Shapes of pairs so small that a pair of random weights is written and loaded in a second."""

from dataclasses import replace

from lab.shapes.shape import DeltaNet, DrafterShape, Experts, Heads, PairShape, Selector, ShortConv

DENSE = PairShape(
    name="mini",
    architecture="qwen3",
    n_layer=6,
    n_embd=256,
    n_ff=512,
    heads=Heads(4, 2, 64),
    n_vocab=600,
    drafter=DrafterShape(2, 512),
    context_length=4096,
)
DFLASH2 = replace(DENSE, drafter=replace(DENSE.drafter, selector=Selector(32, 8)))
DSPARK = replace(DENSE, drafter=replace(DENSE.drafter, markov_rank=32))
EXPERTS = replace(
    DENSE, name="mini-experts", architecture="qwen3moe", experts=Experts(8, 2, 256), tied=True
)
HYBRID = replace(
    DENSE,
    name="mini-hybrid",
    architecture="qwen35",
    drafter=DrafterShape(2, 512, heads=Heads(4, 1, 32)),
    delta_net=DeltaNet(1, 2, head_dim=128),
    pre_tokenizer="qwen35",
)
HYBRID_HEADS = replace(HYBRID, name="mini-hybrid-heads", n_further=1)
HYBRID_EXPERTS = replace(
    HYBRID,
    name="mini-hybrid-experts",
    architecture="qwen35moe",
    experts=Experts(8, 2, 256, n_ff_shared=256),
)
HYBRID_NEXT = replace(
    HYBRID_EXPERTS,
    name="mini-hybrid-next",
    architecture="qwen3next",
    delta_net=DeltaNet(1, 2, head_dim=128, joined=True),
    pre_tokenizer="qwen2",
)
SHORT_CONV = replace(
    DENSE,
    name="mini-conv",
    architecture="lfm2moe",
    experts=Experts(8, 2, 256, n_dense=2),
    short_conv=ShortConv(),
    tied=True,
    pre_tokenizer="lfm2",
)
LLAMA = replace(DENSE, name="mini-llama", architecture="llama", pre_tokenizer="llama-bpe")
GPT_OSS = replace(
    DENSE,
    name="mini-oss",
    architecture="gpt-oss",
    # Rows that are not a whole number of K-quant blocks, as in the real one.
    n_embd=320,
    n_ff=320,
    experts=Experts(8, 2, 320),
    pre_tokenizer="gpt-4o",
)
EVERY = (
    *(DENSE, DFLASH2, DSPARK, EXPERTS, LLAMA, GPT_OSS, HYBRID, HYBRID_EXPERTS, HYBRID_NEXT),
    SHORT_CONV,
)
