"""Plans for machines of several sizes, with the shapes of a real 8B pair and the shipped one."""

import ctypes
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.errors import InputError
from dflash_local.fit.architectures import CELLS, WayBack
from dflash_local.fit.footprint import Footprint
from dflash_local.fit.options import MAX_ROWS_AT_HOME, LoadOptions
from dflash_local.fit.pairing import check_heads
from dflash_local.fit.placement import named_devices
from dflash_local.fit.plan import Plan, make_plan
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.drafter_spec import DrafterSpec, HeadsSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.gguf.header import TensorInfo
from dflash_local.llama.runtime import Device
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from gguf_files import edited
from hybrid import HEAD_DIM, N_HEAD_KV, SNAPSHOTS, WITHOUT, write_hybrid
from llama_log import logged
from shipped_layouts import in_layout
from tiny_coder import pair

GIB = 1 << 30
MIB = 1 << 20


def model(name: str, arch: str, shapes: dict[str, tuple[str, tuple[int, ...]]], **keys: Any):
    """A checked file of these tensors and keys, as if it had been read."""
    tensors = {}
    for tensor, (kind, shape) in shapes.items():
        number = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[number]
        n = 1
        for extent in shape:
            n *= extent
        tensors[tensor] = TensorInfo(tensor, shape, int(number), kind, 0, n // block * size)
    metadata = {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items()}}
    n_bytes = sum(tensor.n_bytes for tensor in tensors.values())
    return GgufFile(Path(name), 3, metadata, {k: "uint32" for k in metadata}, tensors, n_bytes)


def blocks(n: int, d: int, n_ff: int, q: int, kv: int, kind: str):
    shapes = {}
    for i in range(n):
        for part, shape in {
            "attn_norm": (d,),
            "attn_q": (d, q),
            "attn_k": (d, kv),
            "attn_v": (d, kv),
            "attn_output": (q, d),
            "ffn_norm": (d,),
            "ffn_gate": (d, n_ff),
            "ffn_up": (d, n_ff),
            "ffn_down": (n_ff, d),
        }.items():
            shapes[f"blk.{i}.{part}.weight"] = ("F32" if len(shape) == 1 else kind, shape)
    return shapes


SHAPE = {
    "embedding_length": 4096,
    "feed_forward_length": 12288,
    "context_length": 40960,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "attention.key_length": 128,
    "attention.value_length": 128,
}
TARGET = model(
    "Qwen3-8B-Q4_K_M.gguf",
    "qwen3",
    {
        "token_embd.weight": ("Q4_K", (4096, 151936)),
        "output.weight": ("Q6_K", (4096, 151936)),
        "output_norm.weight": ("F32", (4096,)),
        **blocks(36, 4096, 12288, 4096, 1024, "Q4_K"),
    },
    block_count=36,
    **SHAPE,
)
DRAFTER = model(
    "Qwen3-8B-DFlash-Q8_0.gguf",
    "dflash",
    {"fc.weight": ("Q8_0", (5 * 4096, 4096)), **blocks(5, 4096, 12288, 4096, 1024, "Q8_0")},
    block_count=5,
    **SHAPE,
)


SPEC = replace(
    read_drafter(GgufFile.open(pair()[1])),
    block_size=16,
    target_layers=(2, 10, 18, 26, 34),
    **{"n_layer": 5, "n_embd": 4096, "n_head": 32, "n_head_kv": 8, "head_dim": 128},
)


def host(free: float = 32.0, total: float = 64.0) -> Device:
    return Device("CPU", "a processor", "cpu", int(free * GIB), int(total * GIB))


def gpu(free: float, index: int = 0, **more: Any) -> Device:
    size = int(free * GIB)
    bus = f"0000:0{index}:00.0"
    return Device(f"CUDA{index}", "a GPU", "gpu", size, max(size, GIB), id=bus, **more)


def plan(*devices: Device, drafter: bool = True, **wanted: Any) -> Plan:
    pair_files = (DRAFTER, SPEC) if drafter else (None, None)
    n_branches = wanted.pop("n_branches", 1)
    options = LoadOptions(**wanted)
    return make_plan(TARGET, *pair_files, options, devices or (host(),), n_branches)


def fits(plan: Plan) -> bool:
    return all(use.needed <= use.usable < use.free or not use.layers for use in plan.gpus) and (
        plan.host.needed <= plan.host.usable
    )


GPU_SHARING_MEMORY = Device("iGPU0", "", "igpu", 20 * GIB, 24 * GIB, shares_host=True)


@pytest.mark.parametrize(
    ("devices", "wanted", "layers", "n_ctx", "note"),
    [
        # A GPU that holds all layers gets the longest context that fits.
        *(
            ([gpu(size)], {}, [37], n_ctx, "")
            for size, n_ctx in (
                *((24, 32768), (16, 32768), (12, 32768), (10, 16384), (8, 8192), (7, 4096)),
            )
        ),
        ([gpu(6)], {}, [30], 4096, "7 layers stay on the CPU"),
        ([gpu(4)], {}, [13], 4096, "24 layers stay on the CPU"),
        # Too small for the head and the drafter.
        ([gpu(1)], {}, [0], 4096, "37 layers stay on the CPU"),
        ([], {}, [], 8192, ""),
        ([], {"n_gpu_layers": 20}, [], 8192, "llama.cpp found no GPU"),
        ([gpu(80)], {"n_ctx": 65536}, [37], 65536, "trained on 40960 tokens, fewer than 65536"),
        ([gpu(24)], {"n_gpu_layers": 999}, [37], 32768, ""),
        ([gpu(24)], {"n_gpu_layers": -1}, [37], 32768, ""),
        ([gpu(24)], {"n_gpu_layers": 0}, [0], 8192, ""),
        ([gpu(24, 0), gpu(24, 1)], {"tensor_split": [3, 1]}, [28, 9], 32768, ""),
        ([gpu(4, 0), gpu(24, 1)], {"split_mode": "none", "main_gpu": 1}, [37], 32768, ""),
        # A GPU that two backends see counts once, and an integrated one only by itself.
        ([gpu(12), replace(gpu(12), name="Vulkan0")], {}, [37], 32768, ""),
        ([gpu(12), GPU_SHARING_MEMORY], {}, [37], 32768, ""),
    ],
)
def test_layers_and_context_of_a_machine(devices, wanted, layers, n_ctx, note):
    found = plan(*devices, host(), **wanted)
    assert ([use.layers for use in found.gpus], found.n_ctx) == (layers, n_ctx)
    assert (found.n_gpu_layers, found.n_layers) == (sum(layers), 37)
    assert fits(found)
    assert note in found.notes[0] if note else not found.notes
    if not sum(layers):
        assert not any(use.needed for use in found.gpus)
        assert found.host.drafter > found.drafter_bytes and "all on CPU" in found.lines()[0]


def test_an_integrated_gpu_is_used_only_with_what_the_host_has():
    alone = plan(GPU_SHARING_MEMORY, host(free=8, total=24))
    assert alone.gpus[0].needed + alone.host.needed < 8 * GIB


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("layout", "table"),
    [("DSpark", "markov_w1.weight"), ("DFlash 2", "selector_predecessor.weight")],
)
def test_what_a_head_looks_up_for_the_anchor_is_on_the_host_too(
    layout: str, table: str, tmp_path: Path
):
    target = GgufFile.open(pair()[0])
    drafter = GgufFile.open(in_layout(layout, tmp_path / "drafter.gguf"))
    without = edited(drafter, tensors={table: None})
    needed = [
        make_plan(target, file, read_drafter(drafter), LoadOptions(n_ctx=512), [host(8, 16)])
        for file in (drafter, without)
    ]
    more = needed[0].host.needed - needed[1].host.needed
    assert more == 2 * drafter.tensors[table].n_bytes


def test_the_drafter_takes_room_on_the_device_of_the_output_head():
    with_drafter, plain = plan(gpu(24), host()), plan(gpu(24), host(), drafter=False)
    more = with_drafter.gpus[0].needed - plain.gpus[0].needed
    assert more > with_drafter.drafter_bytes + with_drafter.drafter_kv_bytes
    assert plain.drafter_bytes == plain.drafter_kv_bytes == 0
    assert "none" in plain.lines()[1]


@pytest.mark.parametrize("is_tied", [False, True])
def test_heads_take_a_cache_and_on_a_gpu_a_copy_of_the_embeddings(tmp_path: Path, is_tied: bool):
    path = write_hybrid(tmp_path / "heads.gguf", "qwen35", pair()[0], head=0.0)
    file = GgufFile.open(path)
    if is_tied:
        file = edited(file, tensors={"output.weight": None})
    spec = check_heads(file)

    def needed(spec: HeadsSpec, *devices: Device, on_gpu: int) -> int:
        found = make_plan(file, file, spec, LoadOptions(n_ctx=1024, n_seq=2), devices)
        return found.gpus[0].needed if on_gpu else found.host.needed

    by_llama_cpp = replace(spec, layer=None)
    # Of both sequences, keys and values in halves; while it grows, the old one is there, too.
    cache = 2 * (2 * 1280 * 2 * HEAD_DIM * N_HEAD_KV * 2)
    embeddings = file.tensors["token_embd.weight"].n_bytes
    for devices, on_gpu in (([host()], 0), ([gpu(8), host()], 1)):
        more = needed(spec, *devices, on_gpu=on_gpu) - needed(by_llama_cpp, *devices, on_gpu=on_gpu)
        assert more == cache + (embeddings if on_gpu and not is_tied else 0)


def test_the_logits_of_a_markov_head_are_counted():
    options, devices = LoadOptions(n_ctx=1024), [gpu(24), host()]
    plain, markov = (
        make_plan(TARGET, DRAFTER, replace(SPEC, markov_rank=rank), options, devices).gpus[0].needed
        for rank in (0, 256)
    )
    assert markov - plain == 4 * SPEC.block_size * 3 * TARGET.n_vocab


def test_caches_are_counted_to_the_byte():
    found = plan(gpu(24), host(), n_ctx=1000)
    assert found.n_cells == 1024
    assert found.kv_bytes == 1024 * 36 * 2 * 1024 * 2
    assert found.drafter_kv_bytes == 1024 * 5 * 2 * 1024 * 2
    assert plan(gpu(24), host(), n_ctx=1024, kv_type="q8_0").kv_bytes == 1024 * 36 * 2 * 1088
    assert plan(gpu(24), host(), n_ctx=1024, n_seq=4).drafter_kv_bytes == (
        4 * 1280 * 5 * 2 * 1024 * 2
    )


def splits_of_llama_cpp(split: tuple[float, ...], count: int) -> list[int]:
    """Layers by device, by the rule of llama_model::load_tensors, in its single precision."""
    single = [ctypes.c_float(share).value for share in split]
    ends, total = [], 0.0
    for share in single:
        total = ctypes.c_float(total + share).value
        ends.append(total)
    ends = [ctypes.c_float(end / total).value for end in ends]
    counts = [0] * len(split)
    for layer in range(count):
        place = ctypes.c_float(layer / count).value
        counts[next(i for i, end in enumerate(ends) if end > place)] += 1
    return counts


@settings(max_examples=25)
@given(st.lists(st.floats(1, 12), min_size=2, max_size=5))
def test_llama_cpp_places_layers_as_planned_on_any_number_of_gpus(sizes):
    found = plan(*(gpu(size, i) for i, size in enumerate(sizes)), host())
    assert fits(found)
    if found.n_gpu_layers:
        *others, last = (use for use in found.gpus if use.layers)
        assert last.drafter and not any(use.drafter for use in others)
        assert found.tensor_split is not None
        assert splits_of_llama_cpp(found.tensor_split, found.n_gpu_layers) == [
            use.layers for use in found.gpus
        ]


@pytest.mark.parametrize(
    ("devices", "wanted", "words"),
    [
        ((gpu(8), host()), {"n_ctx": 32768, "n_gpu_layers": -1}, "CUDA0 needs .* GiB .*weights"),
        ((gpu(8), host()), {"n_ctx": 1 << 24}, "16777216"),
        ((host(free=3, total=64),), {}, "CPU needs .* of 3.0 GiB free"),
        ((gpu(24), host(free=0.3, total=8)), {}, "CPU needs"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(devices, wanted, words):
    with pytest.raises(InputError, match=words) as error:
        plan(*devices, **wanted)
    assert "\n" not in str(error.value)
    assert "n_ctx" in str(error.value)


@pytest.mark.parametrize(
    "wanted",
    [
        {"n_ctx": 0},
        {"n_ctx": 15},
        {"n_ctx": -1},
        {"n_ctx": (1 << 24) + 1},
        {"n_ctx": 4096.0},
        {"n_ctx": True},
        {"n_gpu_layers": -2},
        {"n_seq": 0},
        {"n_batch": 0},
        {"kv_type": "q3_k"},
        {"cache_type_k": "q3_k"},
        {"cache_type_v": "k"},
        {"kv_type": "q8_0", "flash_attn": False},
        {"split_mode": "both"},
        {"main_gpu": 1},
        {"tensor_split": [1, 1]},
        {"tensor_split": [-1]},
        {"tensor_split": [float("nan")]},
        {"rope_scaling": ""},
        {"rope_freq_base": -1},
        {"yarn_orig_ctx": 1.5},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(wanted):
    with pytest.raises(InputError, match=next(iter(wanted))):
        plan(gpu(24), host(), **wanted)


@settings(max_examples=25)
@given(
    st.lists(st.floats(0, 30), min_size=1, max_size=4),
    st.integers(0, 3),
    st.floats(0, 10),
    st.booleans(),
)
def test_more_memory_on_one_of_the_gpus_never_hurts(sizes, index, more, drafter):
    larger = list(sizes)
    larger[index % len(sizes)] += more
    small, large = (
        plan(*(gpu(size, i) for i, size in enumerate(each)), host(), drafter=drafter)
        for each in (sizes, larger)
    )
    assert fits(small) and fits(large)
    assert large.n_ctx >= small.n_ctx
    assert large.n_gpu_layers >= small.n_gpu_layers


@given(st.floats(8, 64), st.floats(0, 20))
def test_more_host_memory_never_gives_a_smaller_context(size, more):
    assert plan(host(size, 128)).n_ctx <= plan(host(size + more, 128)).n_ctx


def shipped() -> tuple[GgufFile, GgufFile, DrafterSpec]:
    target_path, draft_path = pair()
    drafter = GgufFile.open(draft_path)
    return GgufFile.open(target_path), drafter, read_drafter(drafter)


def logged_mib(log: io.StringIO, pattern: str) -> float:
    return sum(map(float, re.findall(pattern + r" = +([\d.]+) MiB", log.getvalue())))


@pytest.mark.parametrize(
    ("n_ctx", "n_batch", "kv"),
    [
        (1000, 512, {}),
        (4096, 512, {"kv_type": "q8_0"}),
        (4096, 2048, {"cache_type_k": "q8_0"}),
        (4096, 512, {"kv_type": "q5_0", "cache_type_v": "f32"}),
    ],
)
def test_the_shipped_pair_takes_what_was_planned(n_ctx, n_batch, kv):
    file, drafter, spec = shipped()
    options = LoadOptions(n_ctx=n_ctx, n_seq=2, n_batch=n_batch, **kv)
    found = make_plan(file, drafter, spec, options, [host(8, 16)])
    taken = Footprint(file, None, None, options)
    expected = max(taken.compute_blocks(n_ctx), taken.compute_head(n_ctx))
    options = TargetOptions(n_ctx=found.n_ctx, n_seq=2, n_threads=1, n_batch=n_batch, **kv)
    with logged() as log, Target(file.path, options):
        pass
    assert logged_mib(log, "KV buffer size") == pytest.approx(found.kv_bytes / MIB, abs=0.01)
    assert logged_mib(log, "compute buffer size") == pytest.approx(expected / MIB, abs=1.1)


def test_hidden_states_that_wait_for_the_drafter_are_planned():
    """They grow with the slots."""
    file, drafter, spec = shipped()
    drafts = {"n_ctx": 512, "n_batch": 512}
    for n_seq in (1, 4):
        options = TargetOptions(
            n_seq=n_seq, n_threads=1, tapped_layers=spec.target_layers, **drafts
        )
        with Target(file.path, options) as target:
            kept = 4 * target.n_features * target.native.n_stored
        planned = Footprint(file, drafter, spec, LoadOptions(n_seq=n_seq, **drafts))
        assert planned.tap_store == kept
        rest = 2 * planned.drafter_kv(512) + planned._drafter_compute + planned.kept_graphs(512)
        assert planned.drafter(512) == planned.drafter_weights + rest + kept


@pytest.mark.one_in(3)
@pytest.mark.parametrize("architecture", [*SNAPSHOTS, *WITHOUT])
def test_recurrent_states_take_what_was_planned(architecture, tmp_path):
    path = write_hybrid(tmp_path / "target.gguf", architecture, pair()[0])
    way_back = WayBack("snapshots", 5) if architecture in SNAPSHOTS else CELLS
    found = make_plan(
        GgufFile.open(path),
        None,
        None,
        LoadOptions(n_ctx=256, n_seq=3),
        [host(8, 16)],
        way_back=way_back,
    )
    assert found.way_back == way_back
    options = TargetOptions(n_ctx=256, n_seq=3, n_threads=1, way_back=way_back)
    with logged() as log, Target(path, options):
        pass
    states, keys = logged_mib(log, "RS buffer size"), logged_mib(log, "KV buffer size")
    assert states == pytest.approx(found.state_bytes / MIB, abs=0.01)
    assert states + keys == pytest.approx(found.kv_bytes / MIB, abs=0.02)


def test_snapshots_give_way_to_context_and_layers(tmp_path):
    path = write_hybrid(tmp_path / "target.gguf", "qwen35", pair()[0])
    file, options = GgufFile.open(path), LoadOptions(n_ctx=4096, n_seq=250)

    def with_most(n: int, gib: float) -> Plan:
        way_back = WayBack("snapshots", n)
        return make_plan(file, None, None, options, [host(gib, 64)], way_back=way_back)

    needs = {n: with_most(n, 60).host.needed for n in (0, 1, 3, 7, 15)}
    assert sorted(needs.values()) == list(needs.values())
    margin = 256 * MIB
    for n, fewer in ((15, 7), (7, 3), (3, 1)):
        less = with_most(15, (needs[n] + margin - MIB) / GIB)
        assert (less.way_back, less.n_ctx) == (WayBack("snapshots", fewer), 4096)
        assert f"at most {fewer} tokens are drafted at once, not 15" in less.notes[0]
        assert with_most(n, (needs[n] + margin + MIB) / GIB).way_back.rows == n
    with pytest.raises(InputError, match="do not fit"):
        with_most(15, (needs[1] + margin - MIB) / GIB)


def test_ids_of_a_sequence_that_forks_are_counted_on_the_host():
    one, many = (plan(gpu(24), host(), n_ctx=32768, n_branches=n).host.compute for n in (1, 64))
    # Trees are verified in passes of 64 rows, chains in those of a block of 16.
    assert many - one == 48 * 63 * 32768 + 16 * (64 - 16) * 151936


def test_the_plan_in_words_names_files_sizes_and_memory():
    lines = plan(gpu(24), host()).lines()
    assert len(lines) == 4
    assert "Qwen3-8B-Q4_K_M.gguf" in lines[0] and "37 of 37 layers on CUDA0" in lines[0]
    assert "Qwen3-8B-DFlash-Q8_0.gguf" in lines[1]
    assert "32768 tokens" in lines[2] and "4.5 GiB" in lines[2]
    assert "of 24.0 GiB free" in lines[3]


def test_what_replay_keeps_of_a_pass_is_planned(tmp_path):
    path = write_hybrid(tmp_path / "target.gguf", "qwen35", pair()[0])
    file, options = GgufFile.open(path), LoadOptions(n_ctx=256, n_seq=3)

    def planned(n: int) -> Plan:
        way_back = WayBack("replay", n) if n else CELLS
        return make_plan(file, None, None, options, [host(8, 16)], way_back=way_back)

    plain, replayed = planned(0), planned(7)
    # The state of each sequence before the pass; and of 8 rows in 4 layers: 128 inputs and as many
    # results of the convolution, 32 keys, and a gate and a beta for 2 heads.
    more = plain.state_bytes + 3 * 8 * 4 * 4 * (2 * 128 + 32 + 2 * 2)
    assert replayed.host.compute - plain.host.compute == more
    # Two ids more, which keep the cells of several slots in order.
    assert replayed.host.kv - plain.host.kv == 2 * plain.state_bytes // 3
    assert replayed.state_bytes == plain.state_bytes
    options = TargetOptions(n_ctx=256, n_seq=3, n_threads=1, way_back=replayed.way_back)
    with Target(path, options) as target:
        assert target.max_width == 8


def remote(gib: float, number: int = 0) -> Device:
    return replace(gpu(gib, number), name=f"RPC 192.168.1.{number}:50052", is_remote=True)


def test_layers_go_to_workers_and_the_head_stays_here():
    alone = plan(remote(24, 1), remote(24, 2), host())
    assert sum(use.layers for use in alone.gpus) == alone.n_layers
    assert alone.host.drafter > 0 == sum(use.drafter for use in alone.gpus)
    assert f"on {alone.host.name}" in alone.lines()[1]

    beside = plan(remote(24, 1), gpu(6, 0), host())
    assert beside.gpus[0].drafter == 0 < beside.gpus[-1].drafter
    assert beside.gpus[-1].layers >= 1


def mixture() -> GgufFile:
    """The tensors of gpt-oss-120b, as it is published."""
    shapes = blocks(36, 2880, 2880, 4096, 512, "BF16")
    for i in range(36):
        for part in ("gate", "up", "down"):
            del shapes[f"blk.{i}.ffn_{part}.weight"]
            shapes[f"blk.{i}.ffn_{part}_exps.weight"] = ("MXFP4", (2880, 2880, 128))
    embeddings = {name: ("BF16", (2880, 201088)) for name in ("token_embd.weight", "output.weight")}
    keys = {"expert_count": 128, "expert_used_count": 4, "expert_feed_forward_length": 2880}
    shape = SHAPE | {"embedding_length": 2880, "context_length": 131072, "block_count": 36} | keys
    return model("gpt-oss-120b.gguf", "gpt-oss", {**embeddings, **shapes}, **shape)


MIXTURE = mixture()
EXPERTS_OF_A_LAYER = 3 * 2880 * 2880 * 128 // 32 * 17


def mixture_plan(*devices: Device, **wanted: Any) -> Plan:
    return make_plan(MIXTURE, None, None, LoadOptions(**wanted), devices)


def test_a_mixture_may_have_other_experts_in_each_layer():
    listed = ("expert_used_count", "expert_feed_forward_length")
    keys = {f"gpt-oss.{name}": [MIXTURE.metadata[f"gpt-oss.{name}"]] * 36 for name in listed}
    other = replace(MIXTURE, metadata={**MIXTURE.metadata, **keys})
    devices = (gpu(24), host(80, 96))
    assert make_plan(other, None, None, LoadOptions(), devices) == mixture_plan(*devices)


@pytest.mark.parametrize("size", [8, 12, 24, 48])
def test_just_so_many_layers_experts_are_in_ram_as_are_needed(size):
    found = mixture_plan(gpu(size), host(80, 96))
    assert (found.n_gpu_layers, found.n_ctx) == (37, 32768) and fits(found)
    assert 0 < found.n_cpu_moe <= 36 and found.most_rows == MAX_ROWS_AT_HOME
    assert found.experts_bytes == found.n_cpu_moe * EXPERTS_OF_A_LAYER
    told = f"experts of {found.experts_bytes / GIB:.1f} GiB in RAM"
    assert told in found.lines()[0] and "stay in RAM" in found.notes[0]
    fewer = {"n_ctx": 32768, "n_gpu_layers": 37, "n_cpu_moe": found.n_cpu_moe - 1}
    with pytest.raises(InputError, match="CUDA0 needs"):
        mixture_plan(gpu(size), host(80, 96), **fewer)


def test_experts_of_a_mixture_that_fits_and_of_one_that_does_not():
    found = mixture_plan(gpu(80), host(80, 96))
    assert (found.n_cpu_moe, found.experts_bytes, found.notes) == (0, 0, ())
    # Passes are wider only where experts are in RAM, and never for exact answers.
    assert found == mixture_plan(gpu(80), host(80, 96), exact=True)
    small = mixture_plan(gpu(4), host(80, 96))
    assert 0 < small.n_gpu_layers < 37 and small.n_cpu_moe == 36 and fits(small)


def test_what_experts_take_leaves_the_gpu_for_the_host():
    gpu_only, moved, all_moved = (
        mixture_plan(gpu(80), host(80, 96), n_ctx=4096, **how)
        for how in ({"n_cpu_moe": 0}, {"n_cpu_moe": 18}, {"cpu_moe": True})
    )
    for found, n in ((moved, 18), (all_moved, 36)):
        bytes_moved = n * EXPERTS_OF_A_LAYER
        assert gpu_only.gpus[0].weights - found.gpus[0].weights == bytes_moved
        assert found.host.weights - gpu_only.host.weights == bytes_moved
        assert not found.notes


def test_overrides_count_where_they_lie_and_come_before_the_experts():
    by_name, back = (
        mixture_plan(gpu(80), host(80, 96), n_ctx=4096, **how)
        for how in (
            {"override_tensor": {r"blk\.(0|1)\.ffn_up_exps": "CPU", "nothing": "CPU"}},
            {"override_tensor": {"blk": "CUDA0"}, "cpu_moe": True},
        )
    )
    assert by_name.host.weights == 2 * EXPERTS_OF_A_LAYER // 3
    assert "no tensor of the target has a name like nothing" in by_name.notes[0]
    assert back.host.weights == 0 and back.experts_bytes == 0


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"override_tensor": {"ffn": "CUDA7"}}, "'CUDA7'; expected one of CPU, CUDA0"),
        ({"override_tensor": {"ffn": "CUDA0"}, "n_gpu_layers": 0}, "expected one of CPU$"),
        ({"override_tensor": {"(": "CPU"}}, "unterminated"),
        ({"override_tensor": {"(?<=a)b": "CPU"}}, "knows no group"),
        ({"override_tensor": "ffn=CPU"}, "expected patterns"),
        ({"n_cpu_moe": -1}, "n_cpu_moe is -1"),
    ],
)
def test_a_bad_override_is_one_line(wanted, words):
    with pytest.raises(InputError, match=words):
        mixture_plan(gpu(80), host(80, 96), **wanted)


@settings(max_examples=30)
@given(st.lists(st.floats(3, 40), min_size=1, max_size=3), st.floats(0, 20))
def test_more_gpu_memory_never_moves_more_experts(sizes, more):
    small, large = (
        mixture_plan(*(gpu(size + n, i) for i, size in enumerate(sizes)), host(80, 96), n_ctx=8192)
        for n in (0, more)
    )
    assert fits(small) and fits(large)
    assert (large.n_gpu_layers, -large.n_cpu_moe) >= (small.n_gpu_layers, -small.n_cpu_moe)


def test_over_workers_whole_layers_stay_here():
    """The network would be waited for at each layer whose experts are elsewhere."""
    found = mixture_plan(remote(24, 1), host(80, 96))
    assert found.n_cpu_moe == 0 < found.n_gpu_layers < 37
    assert mixture_plan(remote(80, 1), host(80, 96), n_cpu_moe=10).experts_bytes > 0


def test_what_is_not_mapped_is_held():
    mapped, read = (plan(host(), n_ctx=4096, load_mode=mode) for mode in ("mmap", "none"))
    assert mapped.mapped_bytes > 0 == read.mapped_bytes
    assert read.host.needed - mapped.host.needed == mapped.mapped_bytes


def test_gpus_are_used_as_they_are_named():
    two = [gpu(24, 0), gpu(8, 1), remote(8, 2), host()]
    found = [d.name for d in named_devices(two, ["CUDA1", "CUDA0"])]
    assert found == ["RPC 192.168.1.2:50052", "CPU", "CUDA1", "CUDA0"]
    assert [d.name for d in named_devices([gpu(24), host()], ["none"])] == ["CPU"]
    assert named_devices(two, ()) == two
    for wrong in (["CUDA7"], ["CPU"], "CUDA0"):
        with pytest.raises(InputError, match="expected names of a list, of CUDA0, CUDA1, none"):
            named_devices(two, wrong)
    with pytest.raises(InputError, match=r"device is \['CUDA0'\], but no GPU is seen here"):
        named_devices([host()], ["CUDA0"])
