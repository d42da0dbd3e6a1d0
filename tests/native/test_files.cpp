// Drafter files of every kind of wrong: an error of one line, and nothing leaks or dies.

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <utility>

#include "drafter_file.h"
#include "errors.h"
#include "ggml.h"
#include "tests.h"

namespace {

constexpr int n_embd = 512;  // of the shipped target
constexpr int n_vocab = 8192;

using edit = std::pair<const char *, std::function<void(drafter_file &)>>;  // and its error

std::vector<char> read(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write(const std::string & path, const char * data, size_t n) {
    std::ofstream(path, std::ios::binary).write(data, static_cast<std::streamsize>(n));
}

void check_refused(const shipped_pair & pair, const std::string & path, const std::string & part,
                   const std::string & what) {
    check::throws<dflash::file_error>([&] { pair.open_drafter(path); }, part, what);
}

void check_edits(const shipped_pair & pair, const std::vector<edit> & edits) {
    const temporary_file good;
    drafter_file(n_embd).write(good.path());
    const temporary_file file;
    for (const auto & [part, change] : edits) {
        drafter_file drafter(good.path());
        change(drafter);
        drafter.write(file.path());
        check_refused(pair, file.path(), part, part);
    }
}

edit with_u32(const char * key, uint32_t value) {
    return {key, [=](drafter_file & f) { gguf_set_val_u32(f.keys(), key, value); }};
}

edit with_f32(const char * key, float value) {
    return {key, [=](drafter_file & f) { gguf_set_val_f32(f.keys(), key, value); }};
}

edit with_text(const char * error, const char * key, const char * value) {
    return {error, [=](drafter_file & f) { gguf_set_val_str(f.keys(), key, value); }};
}

edit with_tensor(const char * name, ggml_type type, std::vector<int64_t> shape) {
    return {name, [=](drafter_file & f) { f.set(name, type, shape); }};
}

void drafters_of_its_making_load(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file(n_embd).write(file.path());
    const auto d = pair.open_drafter(file.path());
    std::vector<int32_t> ids(3 * d->top_k());
    std::vector<float> logprobs(ids.size());
    d->draft({{0, {}, 1}}, 3, ids.data(), logprobs.data());
}

void files_that_are_no_gguf(const shipped_pair & pair) {
    const temporary_file file;
    check_refused(pair, file.path(), "GGUF", "a file that does not exist");
    write(file.path(), "", 0);
    check_refused(pair, file.path(), "GGUF", "an empty file");
    const std::string noise(5000, 'x');
    write(file.path(), noise.data(), noise.size());
    check_refused(pair, file.path(), "GGUF", "other bytes");
    check_refused(pair, std::filesystem::temp_directory_path().string(), "GGUF", "a folder");
    check_refused(pair, pair.target_path(), "qwen3", "the target");
}

void files_cut_short(const shipped_pair & pair) {
    const std::vector<char> shipped = read(pair.drafter_path());
    const temporary_file file;
    for (int i = 1; i < 12; i++) {
        write(file.path(), shipped.data(), shipped.size() * i / 12);
        check_refused(pair, file.path(), "ends inside tensor", "cut in the data");
    }
    drafter_file(n_embd).write(file.path());
    const std::vector<char> small = read(file.path());
    for (size_t n = 1; n < 1000; n += 37) {
        write(file.path(), small.data(), n);
        check_refused(pair, file.path(), "GGUF", "cut in the header");
    }
}

void keys_that_are_missing(const shipped_pair & pair) {
    std::vector<edit> edits;
    for (const char * key :
         {"dflash.embedding_length", "dflash.block_count", "dflash.attention.head_count",
          "dflash.block_size", "tokenizer.ggml.mask_token_id", "dflash.target_layers",
          "dflash.attention.layer_norm_rms_epsilon"}) {
        edits.push_back({key, [=](drafter_file & f) { gguf_remove_key(f.keys(), key); }});
        edits.push_back({key, [=](drafter_file & f) { gguf_set_val_u64(f.keys(), key, 4); }});
        edits.push_back(with_text(key, key, "4"));
        edits.push_back({key, [=](drafter_file & f) {
                             const uint64_t values[] = {1, 2};
                             gguf_set_arr_data(f.keys(), key, GGUF_TYPE_UINT64, values, 2);
                         }});
    }
    edits.push_back({"architecture",
                     [](drafter_file & f) { gguf_remove_key(f.keys(), "general.architecture"); }});
    edits.push_back(with_text("llama", "general.architecture", "llama"));
    edits.push_back({"general.architecture", [](drafter_file & f) {
                         gguf_set_val_u32(f.keys(), "general.architecture", 1);
                     }});
    edits.push_back(with_text("dflash.rope.freq_base", "dflash.rope.freq_base", "high"));
    check_edits(pair, edits);
}

void keys_out_of_their_range(const shipped_pair & pair) {
    constexpr uint32_t largest = std::numeric_limits<uint32_t>::max();
    std::vector<edit> edits;
    for (const char * key :
         {"dflash.embedding_length", "dflash.block_count", "dflash.attention.head_count",
          "dflash.attention.head_count_kv", "dflash.attention.key_length", "dflash.block_size",
          "dflash.rope.dimension_count"}) {
        for (const uint32_t value : {0u, 1u << 30, 1u << 31, largest}) {
            edits.push_back(with_u32(key, value));
        }
        edits.push_back({key, [=](drafter_file & f) { gguf_set_val_i32(f.keys(), key, -4); }});
    }
    edits.push_back(with_u32("dflash.block_size", 1));
    edits.push_back(with_u32("tokenizer.ggml.mask_token_id", largest));
    edits.push_back(with_u32("dflash.attention.sliding_window", largest));
    edits.push_back(with_u32("dflash.context_length", largest));
    edits.push_back(with_u32("dflash.rope.dimension_count", 33));
    edits.push_back({"even", with_u32("dflash.rope.dimension_count", 7).second});
    edits.push_back({"mask token", with_u32("tokenizer.ggml.mask_token_id", n_vocab).second});
    edits.push_back({"heads", with_u32("dflash.attention.head_count_kv", 3).second});
    edits.push_back({"blk.1.", with_u32("dflash.block_count", 2).second});
    edits.push_back({"blk.1.", with_u32("dflash.block_count", 1000).second});
    for (const float value : {0.0f, -1.0f, NAN, INFINITY}) {
        edits.push_back(with_f32("dflash.attention.layer_norm_rms_epsilon", value));
        edits.push_back(with_f32("dflash.rope.freq_base", value));
    }
    edits.push_back(with_f32("dflash.rope.scaling.factor", -2.0f));
    edits.push_back(with_f32("dflash.attention.scale", NAN));
    edits.push_back(with_text("relu", "dflash.hidden_activation", "relu"));
    edits.push_back({"longrope", [](drafter_file & f) {
                         gguf_set_val_str(f.keys(), "dflash.rope.scaling.type", "longrope");
                         gguf_set_val_f32(f.keys(), "dflash.rope.scaling.factor", 2.0f);
                     }});
    check_edits(pair, edits);
}

void arrays_that_do_not_fit(const shipped_pair & pair) {
    const auto with_layers = [](size_t n) {
        return [n](drafter_file & f) {
            const std::vector<int32_t> layers(n, 1);
            gguf_set_arr_data(f.keys(), "dflash.target_layers", GGUF_TYPE_INT32, layers.data(), n);
        };
    };
    const auto with_pattern = [](size_t n) {
        return [n](drafter_file & f) {
            const std::vector<int8_t> flags(n, 1);
            gguf_set_val_u32(f.keys(), "dflash.attention.sliding_window", 8);
            gguf_set_arr_data(f.keys(), "dflash.attention.sliding_window_pattern", GGUF_TYPE_BOOL,
                              flags.data(), n);
        };
    };
    const char * pattern = "dflash.attention.sliding_window_pattern";
    check_edits(pair, {
                          {"dflash.target_layers", with_layers(0)},
                          {"fc.weight", with_layers(2)},
                          {"dflash.target_layers", with_layers(1 << 20)},
                          {pattern, with_pattern(0)},
                          {pattern, with_pattern(2)},
                          with_u32(pattern, 1),
                      });
}

void tensors_that_do_not_fit(const shipped_pair & pair) {
    std::vector<edit> edits;
    for (const char * name :
         {"fc.weight", "enc.output_norm.weight", "output_norm.weight", "blk.0.attn_norm.weight",
          "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight",
          "blk.0.attn_output.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight",
          "blk.0.ffn_norm.weight", "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight",
          "blk.0.ffn_down.weight"}) {
        edits.push_back({name, [=](drafter_file & f) { f.remove(name); }});
        edits.push_back(with_tensor(name, GGML_TYPE_F32, {n_embd, n_embd, 2}));
        edits.push_back(with_tensor(name, GGML_TYPE_F32, {96}));
    }
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_I32}) {
        edits.push_back(with_tensor("output_norm.weight", type, {n_embd}));
        edits.push_back(with_tensor("blk.0.attn_norm.weight", type, {n_embd}));
        edits.push_back(with_tensor("blk.0.post_ffw_norm.weight", type, {n_embd}));
    }
    edits.push_back(with_tensor("rope_freqs.weight", GGML_TYPE_F16, {16}));
    edits.push_back(with_tensor("rope_freqs.weight", GGML_TYPE_F32, {8}));
    edits.push_back(with_tensor("blk.0.layer_output_scale.weight", GGML_TYPE_F16, {1}));
    for (const ggml_type type : {GGML_TYPE_I8, GGML_TYPE_I16, GGML_TYPE_I32, GGML_TYPE_I64,
                                 GGML_TYPE_F64, GGML_TYPE_Q8_1, GGML_TYPE_Q8_K}) {
        edits.push_back(with_tensor("fc.weight", type, {n_embd, n_embd}));
    }
    edits.push_back(with_tensor("output.weight", GGML_TYPE_I8, {n_embd, n_vocab}));
    edits.push_back(with_tensor("token_embd.weight", GGML_TYPE_Q8_1, {n_embd, n_vocab}));
    edits.push_back(with_tensor("output.weight", GGML_TYPE_Q8_0, {n_embd, n_vocab + 1}));
    edits.push_back(with_tensor("token_embd.weight", GGML_TYPE_Q8_0, {n_embd, n_vocab - 1}));
    for (const char * name : {"blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias",
                              "blk.0.attn_output.bias"}) {
        edits.push_back(with_tensor(name, GGML_TYPE_F32, {96}));
        edits.push_back(with_tensor(name, GGML_TYPE_F32, {n_embd, 2}));
        edits.push_back(with_tensor(name, GGML_TYPE_BF16, {n_embd}));
    }
    edits.push_back(with_tensor("blk.0.ffn_up.bias", GGML_TYPE_F32, {64}));
    edits.push_back(with_tensor("blk.0.attn_sinks.weight", GGML_TYPE_F32, {4}));
    edits.push_back(with_tensor("selector_hidden.weight", GGML_TYPE_F32, {n_embd, 8}));
    edits.push_back(with_tensor("blk.1.attn_norm.weight", GGML_TYPE_F32, {n_embd}));
    check_edits(pair, edits);
}

// ggml's writer does not write them, its reader takes them.
void tensors_without_rows(const shipped_pair & pair) {
    const temporary_file file;
    for (const std::string name : {"blk.0.ffn_gate.weight", "output.weight"}) {
        drafter_file drafter(n_embd);
        drafter.remove(name);  // to have it last, where its size moves no other
        drafter.set(name, GGML_TYPE_F32, {n_embd, 2});
        drafter.write(file.path());
        std::vector<char> bytes = read(file.path());
        const std::string text = static_cast<char>(name.size()) + std::string(7, '\0') + name;
        const auto found = std::search(bytes.begin(), bytes.end(), text.begin(), text.end());
        const size_t n_before = text.size() + sizeof(uint32_t) + sizeof(int64_t);
        std::fill_n(found + static_cast<std::ptrdiff_t>(n_before), sizeof(int64_t), '\0');
        write(file.path(), bytes.data(), bytes.size());
        check_refused(pair, file.path(), name, name);
    }
}

void drafters_of_another_target(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file(256).write(file.path());
    check_refused(pair, file.path(), "256 wide", "width");
}

void every_type_of_weights_drafts(const shipped_pair & pair) {
    const temporary_file good;
    drafter_file(n_embd).write(good.path());
    const temporary_file file;
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const auto type = static_cast<ggml_type>(i);
        if (ggml_get_type_traits(type)->to_float == nullptr) {
            continue;
        }
        drafter_file drafter(good.path());
        drafter.set_zeros("fc.weight", type, {n_embd, n_embd});  // what they hold is not the point
        drafter.set_zeros("blk.0.attn_q.weight", type, {n_embd, 128});
        drafter.write(file.path());
        const auto d = pair.open_drafter(file.path());
        std::vector<int32_t> ids(3 * d->top_k());
        std::vector<float> logprobs(ids.size());
        const std::vector<float> row(d->params().n_features(), 0.5f);
        d->draft({{0, {1, row.data()}, 1}}, 3, ids.data(), logprobs.data());
    }
}

// Its gate and its other half are matrices of one row, as which they lie side by side.
void the_narrowest_feed_forward_drafts(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file drafter(n_embd);
    drafter.set("blk.0.ffn_gate.weight", GGML_TYPE_F32, {n_embd, 1});
    drafter.set("blk.0.ffn_up.weight", GGML_TYPE_F32, {n_embd, 1});
    drafter.set("blk.0.ffn_down.weight", GGML_TYPE_F32, {1, n_embd});
    drafter.write(file.path());
    const auto d = pair.open_drafter(file.path());
    std::vector<int32_t> ids(3 * d->top_k());
    std::vector<float> logprobs(ids.size());
    d->draft({{0, {}, 1}}, 3, ids.data(), logprobs.data());
}

// Any bytes of the header or the data changed: a typed error, or drafts.
void damaged_files(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file(n_embd).write(file.path());
    const std::vector<char> good = read(file.path());
    std::mt19937 random(11);
    int n_refused = 0;
    for (int i = 0; i < 400; i++) {
        std::vector<char> bytes = good;
        const size_t reach = i % 4 == 0 ? bytes.size() : 2000;
        for (int j = 0; j <= i % 3; j++) {
            bytes[random() % reach] = static_cast<char>(random());
        }
        write(file.path(), bytes.data(), bytes.size());
        try {
            const auto d = pair.open_drafter(file.path());
            const int n_draft = d->params().block_size - 1;
            std::vector<int32_t> ids(static_cast<size_t>(n_draft) * d->top_k());
            std::vector<float> logprobs(ids.size());
            const std::vector<float> rows(3 * d->params().n_features(), 0.5f);
            d->draft({{0, {3, rows.data()}, 1}}, n_draft, ids.data(), logprobs.data());
        } catch (const dflash::file_error &) {
            n_refused++;
        } catch (const dflash::backend_error &) {
            n_refused++;  // weights that put out no numbers
        }
    }
    check::that(n_refused > 50, "the damage is not where it shows");
}

}  // namespace

temporary_file::temporary_file() {
    static int n = 0;
    static const unsigned seed = std::random_device()();
    const std::string name = "test_native-" + std::to_string(seed) + "-" + std::to_string(n++);
    path_ = (std::filesystem::temp_directory_path() / (name + ".gguf")).string();
}

temporary_file::~temporary_file() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
}

std::vector<check::test> file_tests(const shipped_pair & pair) {
    const auto with = [&](void (*body)(const shipped_pair &)) {
        return [&pair, body] { body(pair); };
    };
    return {
        {"drafters of the tests' making load", with(drafters_of_its_making_load)},
        {"files that are no GGUF", with(files_that_are_no_gguf)},
        {"files cut short", with(files_cut_short)},
        {"keys that are missing, or of another type", with(keys_that_are_missing)},
        {"keys out of their range", with(keys_out_of_their_range)},
        {"arrays that do not fit", with(arrays_that_do_not_fit)},
        {"tensors that do not fit", with(tensors_that_do_not_fit)},
        {"tensors without rows", with(tensors_without_rows)},
        {"drafters of another target", with(drafters_of_another_target)},
        {"every type of weights drafts", with(every_type_of_weights_drafts)},
        {"the narrowest feed-forward drafts", with(the_narrowest_feed_forward_drafts)},
        {"damaged files", with(damaged_files)},
    };
}
