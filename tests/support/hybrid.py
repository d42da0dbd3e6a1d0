"""Tiny targets with random weights whose layers are partly recurrent, one of each architecture.

Their weights are scaled so that the next token depends on the whole state: a state that is wrong
anywhere shows in the answer. Some of them may have a head that predicts further tokens, and some
have no recurrent layer at all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from gguf_files import Tensor, keys_of, parts
from random_model import LOGIT_STD, RandomModel, Weights

SNAPSHOTS = (
    "qwen35", "qwen35moe", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "bailingmoe3",
    "kimi-k3",
)  # fmt: skip
"""llama.cpp keeps snapshots of their states."""
WITHOUT = ("qwen3next", "granitehybrid", "mamba2", "kimi-linear")
"""It does not of these."""
TAPPED = ("qwen35", "qwen35moe", "lfm2", "lfm2moe", "bailingmoe3")
"""Drafts are made for these: their layers can be tapped, too."""
REPLAYED = (
    "qwen35", "qwen35moe", "qwen3next", "bailingmoe3", "kimi-k3", "kimi-linear", "lfm2", "lfm2moe",
)  # fmt: skip
"""Drafts are made for these without snapshots: rejected rows are taken back by replay."""
ROUTED = (
    "qwen35moe", "qwen3next", "lfm2moe", "nemotron_h_moe", "bailingmoe3", "kimi-k3", "kimi-linear",
)  # fmt: skip
"""Mixtures of experts, of which a router may choose another one when sums round differently."""

N_EMBD, N_LAYER, N_FF = 64, 6, 96
N_HEAD, N_HEAD_KV, HEAD_DIM = 2, 1, 32
STATE, N_KEY_HEADS, N_VALUE_HEADS, KERNEL = 32, 1, 2, 4
N_EXPERT, N_USED, N_FF_EXPERT = 8, 2, 32
L_CACHE = 3
N_INDEXED = 512
"""More than texts here have. Of so few heads many scores are 0, and which of equal ones are taken
depends on where their cells lie."""
ATTENTION_LAYERS = (2, 5)
KV_HEADS = [N_HEAD_KV * (layer in ATTENTION_LAYERS) for layer in range(N_LAYER)]
TAPS = (2, 5)
"""Inputs of these layers are what the tests tap: one follows a recurrent layer, one attention."""


def write_hybrid(
    path: Path,
    architecture: str,
    source: Path,
    *,
    quant: str = "Q8_0",
    seed: int = 0,
    head: float | None = None,
) -> Path:
    """Write a target of that architecture with the vocabulary of the target at `source`.

    `quant` names the ggml type of its matrices. Routers have it, too: in F32 they would choose
    other experts now and then when several rows are computed together. With `head` there is a layer
    more, a head that predicts a further token: as the target would if its layers added nothing to
    what goes through them, and they add `head` of what they would do by themselves. So a head is
    always right at 0, and sometimes at 0.1.
    """
    of_source = keys_of(source)
    model = _Hybrid(architecture, quant, seed)
    if head is not None:
        model.has_head, model.added = True, head
    model.keys |= {name: v for name, v in of_source.items() if name.startswith("tokenizer.")}
    _WRITERS[architecture](model, len(of_source["tokenizer.ggml.tokens"][0]))
    return model.write(path)


@dataclass
class _Hybrid(RandomModel):
    has_head: bool = False


def _shape(model: RandomModel, **more: int | float | list[int]) -> None:
    model.numbers(
        block_count=N_LAYER,
        context_length=4096,
        embedding_length=N_EMBD,
        attention__head_count=N_HEAD,
        attention__key_length=HEAD_DIM,
        attention__value_length=HEAD_DIM,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=1e6,
    )
    model.numbers(**more)


def _n_experts(model: RandomModel, **more: int) -> None:
    model.numbers(
        expert_count=N_EXPERT,
        expert_used_count=N_USED,
        expert_feed_forward_length=N_FF_EXPERT,
        **more,
    )


def _head(model: RandomModel, n_vocab: int, norm: str = "output_norm.weight") -> None:
    model.matrix("token_embd.weight", n_vocab, N_EMBD, gain=LOGIT_STD)
    model.matrix("output.weight", n_vocab, N_EMBD, gain=LOGIT_STD)
    model.norm(norm, N_EMBD)


def _layers(model: _Hybrid, *norms: str) -> Iterator[tuple[int, str]]:
    """The number of each layer, with a head's, and how its names begin; its norms are added."""
    for layer in range(N_LAYER + model.has_head):
        for name in ("attn_norm", *norms):
            model.norm(f"blk.{layer}.{name}.weight", N_EMBD)
        yield layer, f"blk.{layer}."


def _scores(model: RandomModel, name: str) -> None:
    model.plain(name, 0.05 * model.normal(name, N_EMBD))


def _attention(
    model: RandomModel, block: str, *, gated: bool = False, qk_norm: bool = True
) -> None:
    width = N_HEAD * HEAD_DIM
    model.matrix(block + "attn_q.weight", width * (2 if gated else 1), N_EMBD)
    model.matrix(block + "attn_k.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
    model.matrix(block + "attn_v.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
    model.matrix(block + "attn_output.weight", N_EMBD, width, gain=2)
    if qk_norm:
        model.norm(block + "attn_q_norm.weight", HEAD_DIM, mean=1.4)
        model.norm(block + "attn_k_norm.weight", HEAD_DIM, mean=1.4)


def _delta_net(model: RandomModel, block: str) -> None:
    keys, values = N_KEY_HEADS * STATE, N_VALUE_HEADS * STATE
    model.matrix(block + "attn_qkv.weight", 2 * keys + values, N_EMBD)
    model.matrix(block + "attn_gate.weight", values, N_EMBD)
    _conv(model, block, 2 * keys + values)
    model.plain(block + "ssm_dt.bias", model.normal(block + "dt", N_VALUE_HEADS))
    model.plain(block + "ssm_a", -np.exp(model.normal(block + "a", N_VALUE_HEADS) - 2))
    if model.architecture == "qwen3next":
        model.matrix(block + "ssm_ba.weight", 2 * N_VALUE_HEADS, N_EMBD)
    else:
        model.matrix(block + "ssm_beta.weight", N_VALUE_HEADS, N_EMBD)
        model.matrix(block + "ssm_alpha.weight", N_VALUE_HEADS, N_EMBD)
    model.norm(block + "ssm_norm.weight", STATE)
    model.matrix(block + "ssm_out.weight", N_EMBD, values, gain=2)


def _conv(model: RandomModel, block: str, width: int, *, bias: bool = False) -> None:
    model.plain(block + "ssm_conv1d.weight", model.normal(block + "conv", width, KERNEL))
    if bias:
        model.plain(block + "ssm_conv1d.bias", model.normal(block + "conv_bias", width))


def _mamba2(model: RandomModel, block: str, inner: int) -> None:
    n_heads, n_groups = N_VALUE_HEADS, 1
    width = inner + 2 * n_groups * STATE
    model.matrix(block + "ssm_in.weight", inner + width + n_heads, N_EMBD)
    _conv(model, block, width, bias=True)
    model.plain(block + "ssm_dt.bias", model.normal(block + "dt", n_heads))
    model.plain(block + "ssm_a", -np.exp(model.normal(block + "a", n_heads, 1) - 2))
    model.plain(block + "ssm_d", np.ones((n_heads, 1)))
    model.norm(block + "ssm_norm.weight", n_groups, inner // n_groups)
    model.matrix(block + "ssm_out.weight", N_EMBD, inner, gain=2)


def _states(model: RandomModel, inner: int, n_groups: int) -> None:
    model.numbers(
        ssm__conv_kernel=KERNEL,
        ssm__inner_size=inner,
        ssm__state_size=STATE,
        ssm__time_step_rank=N_VALUE_HEADS,
        ssm__group_count=n_groups,
    )


def _kda(model: RandomModel, block: str) -> None:
    """Kimi's delta attention: the decay has a value for each row of a state."""
    inner = N_HEAD * STATE
    for name in ("q", "k", "v"):
        model.matrix(f"{block}attn_{name}.weight", inner, N_EMBD)
        conv = model.normal(block + "conv_" + name, inner, 1, KERNEL)
        model.plain(f"{block}ssm_conv1d_{name}.weight", conv)
    a = np.exp(model.normal(block + "a", N_HEAD) - 1)
    model.plain(block + "ssm_dt.bias", model.normal(block + "dt", inner))
    model.matrix(block + "ssm_beta.weight", N_HEAD, N_EMBD)
    model.norm(block + "ssm_norm.weight", STATE)
    model.matrix(block + "attn_output.weight", N_EMBD, inner, gain=2)
    if model.architecture == "bailingmoe3":
        model.plain(block + "ssm_a", a[:, None])
        model.matrix(block + "ssm_f_a.weight", inner, N_EMBD)
        model.matrix(block + "ssm_g_a.weight", inner, N_EMBD)
        return
    model.matrix(block + "ssm_f_a.weight", STATE, N_EMBD)
    model.matrix(block + "ssm_f_b.weight", inner, STATE)
    if model.architecture == "kimi-k3":
        model.plain(block + "ssm_a", -a)
        model.matrix(block + "ssm_g.weight", inner, N_EMBD)
    else:
        model.plain(block + "ssm_a", -a[:, None])
        model.matrix(block + "ssm_g_a.weight", STATE, N_EMBD)
        model.matrix(block + "ssm_g_b.weight", inner, STATE)


def _latent_attention(model: RandomModel, block: str) -> None:
    """Attention over one latent vector of each token, which all heads share."""
    model.matrix(block + "attn_q.weight", N_HEAD * 2 * HEAD_DIM, N_EMBD)
    model.matrix(block + "attn_kv_a_mqa.weight", 2 * HEAD_DIM, N_EMBD)
    model.norm(block + "attn_kv_a_norm.weight", HEAD_DIM, mean=1.4)
    model.matrix(block + "attn_k_b.weight", N_HEAD, HEAD_DIM, HEAD_DIM)
    model.matrix(block + "attn_v_b.weight", N_HEAD, HEAD_DIM, HEAD_DIM)
    model.matrix(block + "attn_output.weight", N_EMBD, N_HEAD * HEAD_DIM, gain=2)
    if model.architecture == "bailingmoe3":
        model.matrix(block + "attn_gate.weight", N_HEAD, N_EMBD)


def _dense(model: RandomModel, block: str, *, gated: bool = True) -> None:
    if gated:
        model.matrix(block + "ffn_gate.weight", N_FF, N_EMBD, gain=2)
    model.matrix(block + "ffn_up.weight", N_FF, N_EMBD)
    model.matrix(block + "ffn_down.weight", N_EMBD, N_FF)


def _experts(
    model: RandomModel,
    block: str,
    *,
    shared: bool,
    gated: bool = True,
    weighed: bool = False,
    biased: bool = False,
) -> None:
    """`shared`: one expert that every token uses, with a weight of its own if `weighed`. `biased`:
    the router's choice has a bias."""
    model.matrix(block + "ffn_gate_inp.weight", N_EXPERT, N_EMBD, gain=4)
    if biased:
        bias = 0.1 * model.normal(block + "exp_probs", N_EXPERT)
        model.plain(block + "exp_probs_b.bias", bias)
    if weighed:
        model.matrix(block + "ffn_gate_inp_shexp.weight", N_EMBD)
    if gated:
        model.matrix(block + "ffn_gate_exps.weight", N_EXPERT, N_FF_EXPERT, N_EMBD, gain=2)
    model.matrix(block + "ffn_up_exps.weight", N_EXPERT, N_FF_EXPERT, N_EMBD)
    model.matrix(block + "ffn_down_exps.weight", N_EXPERT, N_EMBD, N_FF_EXPERT)
    if shared:
        if gated:
            model.matrix(block + "ffn_gate_shexp.weight", N_FF_EXPERT, N_EMBD, gain=2)
        model.matrix(block + "ffn_up_shexp.weight", N_FF_EXPERT, N_EMBD)
        model.matrix(block + "ffn_down_shexp.weight", N_EMBD, N_FF_EXPERT)


def _qwen(model: _Hybrid, n_vocab: int) -> None:
    """qwen35, qwen35moe and qwen3next: gated delta nets, and gated attention."""
    has_experts = model.architecture != "qwen35"
    _shape(
        model,
        feed_forward_length=N_FF,
        attention__head_count_kv=N_HEAD_KV,
        rope__dimension_count=16,
        full_attention_interval=3,
    )
    if model.architecture != "qwen3next":
        model.numbers(rope__dimension_sections=[3, 3, 2, 0])
    _states(model, N_VALUE_HEADS * STATE, N_KEY_HEADS)
    if has_experts:
        _n_experts(model, expert_shared_feed_forward_length=N_FF_EXPERT)
    _head(model, n_vocab)
    for layer, block in _layers(model, "post_attention_norm"):
        if layer == N_LAYER:
            _further_head(model, block)
        if layer in ATTENTION_LAYERS or layer == N_LAYER:
            _attention(model, block, gated=True)
        else:
            _delta_net(model, block)
        if has_experts:
            _experts(model, block, shared=True, weighed=True)
        else:
            _dense(model, block)


def _glm(model: _Hybrid, n_vocab: int) -> None:
    """glm4moe: no recurrent layers, and experts but for the first layer."""
    _shape(
        model,
        feed_forward_length=N_FF,
        attention__head_count_kv=N_HEAD_KV,
        rope__dimension_count=16,
        leading_dense_block_count=1,
        expert_gating_func=2,
    )
    _n_experts(model, expert_shared_count=1)
    _head(model, n_vocab)
    for layer, block in _layers(model, "post_attention_norm"):
        _attention(model, block)
        if layer == N_LAYER:
            _further_head(model, block)
        if layer:
            _experts(model, block, shared=True, biased=True)
        else:
            _dense(model, block)


def _latent(model: _Hybrid, n_vocab: int) -> None:
    """deepseek2, as of GLM-4.7-Flash, deepseek32 and glm-dsa: latent attention in each layer, of
    the latter two over tokens that an indexer has chosen, and experts but for the first layer."""
    has_indexer = model.architecture != "deepseek2"
    _shape(
        model,
        feed_forward_length=N_FF,
        attention__head_count_kv=1,
        attention__q_lora_rank=N_EMBD // 2,
        attention__kv_lora_rank=HEAD_DIM,
        attention__key_length=2 * HEAD_DIM,
        attention__key_length_mla=2 * HEAD_DIM,
        attention__value_length_mla=HEAD_DIM,
        rope__dimension_count=HEAD_DIM,
        leading_dense_block_count=1,
        expert_gating_func=2,
    )
    _n_experts(model, expert_shared_count=1)
    if has_indexer:
        model.numbers(
            attention__indexer__head_count=N_HEAD,
            attention__indexer__key_length=2 * HEAD_DIM,
            attention__indexer__top_k=N_INDEXED,
        )
    _head(model, n_vocab)
    for layer, block in _layers(model, "ffn_norm"):
        _latent_attention(model, block)
        if has_indexer:
            _indexer(model, block)
        del model.tensors[block + "attn_q.weight"]
        model.matrix(block + "attn_q_a.weight", N_EMBD // 2, N_EMBD)
        model.norm(block + "attn_q_a_norm.weight", N_EMBD // 2)
        model.matrix(block + "attn_q_b.weight", N_HEAD * 2 * HEAD_DIM, N_EMBD // 2)
        if layer == N_LAYER:
            _further_head(model, block)
        if layer:
            _experts(model, block, shared=True, biased=True)
        else:
            _dense(model, block)


def _indexer(model: RandomModel, block: str) -> None:
    model.norm(block + "indexer.k_norm.weight", 2 * HEAD_DIM)
    model.plain(block + "indexer.k_norm.bias", 0.1 * model.normal(block + "k_bias", 2 * HEAD_DIM))
    model.matrix(block + "indexer.proj.weight", N_HEAD, N_EMBD)
    model.matrix(block + "indexer.attn_k.weight", 2 * HEAD_DIM, N_EMBD)
    model.matrix(block + "indexer.attn_q_b.weight", N_HEAD * 2 * HEAD_DIM, N_EMBD // 2)


def _further_head(model: _Hybrid, block: str) -> None:
    """Add the tensors of a head besides its layer."""
    model.numbers(block_count=N_LAYER + 1, nextn_predict_layers=1)
    of_state = model.added * model.normal(block + "of_state", N_EMBD, N_EMBD) / np.sqrt(N_EMBD)
    of_both = np.concatenate([np.eye(N_EMBD, dtype=np.float32), of_state], axis=1)
    model.plain(block + "nextn.eh_proj.weight", of_both)
    model.plain(block + "nextn.enorm.weight", np.ones(N_EMBD))
    model.norm(block + "nextn.hnorm.weight", N_EMBD)


def _lfm2(model: _Hybrid, n_vocab: int) -> None:
    """lfm2 and lfm2moe: short convolutions, and attention."""
    has_experts = model.architecture == "lfm2moe"
    _shape(
        model,
        feed_forward_length=N_FF,
        attention__head_count_kv=KV_HEADS,
        shortconv__l_cache=L_CACHE,
    )
    if has_experts:
        _n_experts(model, leading_dense_block_count=1, expert_gating_func=2)
    _head(model, n_vocab, "token_embd_norm.weight")
    for layer, block in _layers(model, "ffn_norm"):
        if layer in ATTENTION_LAYERS:
            _attention(model, block)
        else:
            conv = model.normal(block + "shortconv", N_EMBD, L_CACHE)
            model.plain(block + "shortconv.conv.weight", conv)
            model.matrix(block + "shortconv.in_proj.weight", 3 * N_EMBD, N_EMBD, gain=2)
            model.matrix(block + "shortconv.out_proj.weight", N_EMBD, N_EMBD)
        if has_experts and layer >= 1:
            _experts(model, block, shared=False, biased=True)
        else:
            _dense(model, block)


def _sliding(model: _Hybrid, n_vocab: int) -> None:
    """step35 and mimo2: attention, in most layers over a window. Here they have no experts."""
    layers = range(N_LAYER + model.has_head)
    _shape(
        model,
        feed_forward_length=N_FF,
        expert_feed_forward_length=N_FF_EXPERT,
        attention__head_count_kv=N_HEAD_KV,
        attention__sliding_window=24,
        attention__sliding_window_pattern=[int(layer % 3 > 0) for layer in layers],
        rope__dimension_count=HEAD_DIM,
    )
    _head(model, n_vocab)
    for layer, block in _layers(model, "ffn_norm"):
        if model.architecture == "mimo2":
            width = (N_HEAD + 2 * N_HEAD_KV) * HEAD_DIM
            model.matrix(block + "attn_qkv.weight", width, N_EMBD)
            model.matrix(block + "attn_output.weight", N_EMBD, N_HEAD * HEAD_DIM, gain=2)
        else:
            _attention(model, block)
            model.matrix(block + "attn_gate.weight", N_HEAD, N_EMBD)
        if layer == N_LAYER:
            _further_head(model, block)
        _dense(model, block)


def _gemma4(model: _Hybrid, n_vocab: int) -> None:
    """Attention, in most layers over a window and with smaller heads, and a norm after each part of
    a layer, which decides how much that adds."""
    _gemma4_shape(model, range(N_LAYER))
    _head(model, n_vocab)
    model.plain("rope_freqs.weight", np.ones(HEAD_DIM))
    for layer in range(N_LAYER):
        block = f"blk.{layer}."
        size = _gemma4_layer(model, block, N_EMBD, layer in ATTENTION_LAYERS)
        model.matrix(block + "attn_k.weight", N_HEAD_KV * size, N_EMBD)
        model.matrix(block + "attn_v.weight", N_HEAD_KV * size, N_EMBD)
        model.norm(block + "attn_k_norm.weight", size, mean=0.3)  # scores are not scaled


def _gemma4_shape(model: RandomModel, layers: range) -> None:
    _shape(
        model,
        block_count=len(layers),
        feed_forward_length=N_FF,
        embedding_length_per_layer_input=0,
        attention__head_count_kv=N_HEAD_KV,
        attention__key_length=2 * HEAD_DIM,
        attention__value_length=2 * HEAD_DIM,
        attention__key_length_swa=HEAD_DIM,
        attention__value_length_swa=HEAD_DIM,
        attention__sliding_window=24,
        rope__dimension_count=2 * HEAD_DIM,
        rope__dimension_count_swa=HEAD_DIM,
        rope__freq_base_swa=1e4,
    )
    model.key("attention.sliding_window_pattern", [i not in ATTENTION_LAYERS for i in layers])


def _gemma4_layer(model: _Hybrid, block: str, n_embd: int, is_full: bool) -> int:
    """Add what a layer of the target's and one of an assistant have. Returns the size of a head."""
    size = (2 if is_full else 1) * HEAD_DIM
    for name in ("attn_norm", "ffn_norm"):
        model.norm(f"{block}{name}.weight", n_embd)
    for name in ("post_attention_norm", "post_ffw_norm"):
        added = model.added * (1 + 0.2 * model.normal(block + name, n_embd))
        model.plain(f"{block}{name}.weight", added)
    model.matrix(block + "attn_q.weight", N_HEAD * size, n_embd)
    model.norm(block + "attn_q_norm.weight", size)
    model.matrix(block + "attn_output.weight", n_embd, N_HEAD * size)
    model.matrix(block + "ffn_gate.weight", N_FF, n_embd, gain=2)
    model.matrix(block + "ffn_up.weight", N_FF, n_embd)
    model.matrix(block + "ffn_down.weight", n_embd, N_FF)
    return size


def write_assistant(path: Path, target: Path, *, added: float, quant: str = "Q8_0") -> Path:
    """Write heads of a `gemma4` target in a file of their own. They are right as those of
    `write_hybrid` are: always, if they and the target add nothing to what goes through them."""
    keys, tensors = parts(target)
    model = _Hybrid("gemma4-assistant", quant, 1, added=added)
    model.keys |= {name: v for name, v in keys.items() if name.startswith("tokenizer.")}
    n_embd = 2 * N_EMBD  # llama.cpp wants another size than the target's
    layers = range(N_LAYER - 2, N_LAYER)
    _gemma4_shape(model, layers)
    model.numbers(embedding_length=n_embd, embedding_length_out=N_EMBD, nextn_predict_layers=2)
    for layer in range(2):
        block = f"blk.{layer}."
        _gemma4_layer(model, block, n_embd, layers[layer] in ATTENTION_LAYERS)
        model.plain(block + "layer_output_scale.weight", np.ones(1))
    model.plain("rope_freqs.weight", np.ones(HEAD_DIM))
    head, norm = (_values(tensors[name]) for name in ("output.weight", "output_norm.weight"))
    of_state = model.normal("of_state", N_EMBD, N_EMBD) / np.sqrt(N_EMBD)
    of_both = np.concatenate([np.eye(N_EMBD), added * of_state], axis=1)
    model.plain("nextn.pre_projection.weight", np.concatenate([of_both, 0 * of_both]))
    model.matrix("nextn.post_projection.weight", N_EMBD, n_embd)
    model.plain("token_embd.weight", np.concatenate([head, 0 * head], axis=1))
    model.plain("output_norm.weight", np.concatenate([norm, norm]))
    return model.write(path)


def _values(tensor: Tensor) -> Weights:
    return gguf.quants.dequantize(*tensor)


def _nemotron_h(model: _Hybrid, n_vocab: int) -> None:
    """nemotron_h and nemotron_h_moe: Mamba 2, attention and feed-forward in layers of their own. A
    head has both of the latter."""
    has_experts = model.architecture == "nemotron_h_moe"
    kinds = ["mamba", "dense", "attention", "mamba", "dense", "attention"]
    kinds += ["attention"] * model.has_head
    _shape(
        model,
        feed_forward_length=[N_FF * (kind == "dense") for kind in kinds],
        attention__head_count_kv=[N_HEAD_KV * (kind == "attention") for kind in kinds],
        attention__layer_norm_epsilon=1e-6,
        rope__dimension_count=HEAD_DIM,
    )
    if has_experts:
        _n_experts(model, expert_shared_feed_forward_length=N_FF_EXPERT)
    _states(model, N_EMBD, 1)
    _head(model, n_vocab)
    for layer, kind in enumerate(kinds):
        block = f"blk.{layer}."
        model.norm(block + "attn_norm.weight", N_EMBD)
        if kind == "mamba":
            _mamba2(model, block, N_EMBD)
        elif kind == "dense" and has_experts:
            _experts(model, block, shared=True, gated=False, biased=True)
        elif kind == "dense":
            _dense(model, block, gated=False)
        else:
            _attention(model, block, qk_norm=False)
        if layer == N_LAYER:
            _further_head(model, block)
            model.norm(block + "nextn.shared_head_norm.weight", N_EMBD)
            model.norm(block + "post_attention_norm.weight", N_EMBD)
            _experts(model, block, shared=True, gated=False, biased=True)


def _granite_hybrid(model: _Hybrid, n_vocab: int) -> None:
    """Mamba 2 or attention, then feed-forward."""
    _shape(
        model,
        feed_forward_length=N_FF,
        attention__head_count_kv=KV_HEADS,
        rope__dimension_count=HEAD_DIM,
    )
    _states(model, 2 * N_EMBD, 1)
    _head(model, n_vocab)
    for layer, block in _layers(model, "ffn_norm"):
        if layer in ATTENTION_LAYERS:
            _attention(model, block, qk_norm=False)
        else:
            _mamba2(model, block, 2 * N_EMBD)
        _dense(model, block)


def _only_mamba2(model: _Hybrid, n_vocab: int) -> None:
    """Mamba 2 in all layers."""
    _shape(model, feed_forward_length=0)
    _states(model, 2 * N_EMBD, 1)
    _head(model, n_vocab)
    for _, block in _layers(model):
        _mamba2(model, block, 2 * N_EMBD)


def _kimi(model: _Hybrid, n_vocab: int) -> None:
    """kimi-linear, kimi-k3 and bailingmoe3: Kimi's delta attention and latent attention."""
    layers = range(N_LAYER + model.has_head)
    latent = (*ATTENTION_LAYERS, N_LAYER)
    _shape(
        model,
        feed_forward_length=N_FF,
        attention__head_count_kv=[int(layer in latent) for layer in layers],
        attention__key_length=2 * HEAD_DIM,
        attention__value_length=HEAD_DIM,
        attention__key_length_mla=2 * HEAD_DIM,
        attention__value_length_mla=HEAD_DIM,
        attention__kv_lora_rank=HEAD_DIM,
        rope__dimension_count=HEAD_DIM,
        ssm__conv_kernel=KERNEL,
        kda__head_dim=STATE,
    )
    # Experts in the last layer only: if sums round so that its router chooses another one, no state
    # after it is changed.
    n_dense = N_LAYER - 1
    _n_experts(
        model, leading_dense_block_count=n_dense, expert_gating_func=2, expert_shared_count=1
    )
    if model.architecture != "kimi-linear":
        model.numbers(kda__gate_lower_bound=-5.0)
    if model.architecture == "kimi-k3":
        model.numbers(attn_res__block_size=2)
        model.numbers(activation__situ_beta=2.0, activation__situ_linear_beta=2.0)
        _scores(model, "output_res_score.weight")
    _head(model, n_vocab)
    for layer, block in _layers(model, "ffn_norm"):
        if layer == N_LAYER:
            _further_head(model, block)
            model.norm(block + "layer_output_norm.weight", N_EMBD)
        if model.architecture == "kimi-k3":
            _scores(model, block + "attn_res_score.weight")
            _scores(model, block + "ffn_res_score.weight")
        if layer in latent:
            _latent_attention(model, block)
        else:
            _kda(model, block)
        if layer < n_dense:
            _dense(model, block)
        else:
            _experts(model, block, shared=True, biased=True)


_WRITERS: dict[str, Callable[[_Hybrid, int], None]] = {
    "qwen35": _qwen,
    "qwen35moe": _qwen,
    "qwen3next": _qwen,
    "glm4moe": _glm,
    "mimo2": _sliding,
    "step35": _sliding,
    "gemma4": _gemma4,
    "deepseek2": _latent,
    "deepseek32": _latent,
    "glm-dsa": _latent,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "kimi-linear": _kimi,
    "kimi-k3": _kimi,
    "bailingmoe3": _kimi,
    "granitehybrid": _granite_hybrid,
    "mamba2": _only_mamba2,
}
