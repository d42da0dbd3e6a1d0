// Drafter files of every kind of wrong: an error of one line, and nothing leaks or dies.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <utility>

#include "check.h"
#include "drafter_file.h"
#include "drafts.h"
#include "errors.h"
#include "ggml.h"

namespace {

constexpr int n_embd = shipped_pair::n_embd;
constexpr int n_vocab = shipped_pair::n_vocab;

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
    check::throws<dflash::file_error>([&] { pair.open_drafter(path, small_params()); }, part, what);
}

void check_edits(const shipped_pair & pair, const std::vector<edit> & edits) {
    const temporary_file good;
    drafter_file(small_params()).write(good.path());
    const temporary_file file;
    for (const auto & [part, change] : edits) {
        drafter_file drafter(good.path());
        change(drafter);
        drafter.write(file.path());
        check_refused(pair, file.path(), part, part);
    }
}

edit with_tensor(const char * name, ggml_type type, std::vector<int64_t> shape) {
    return {name, [=](drafter_file & f) { f.set(name, type, shape); }};
}

void drafters_of_its_making_load(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file(small_params()).write(file.path());
    const auto d = pair.open_drafter(file.path(), small_params());
    draft(*d, {{0, {}, 1}}, 3);
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
    check_refused(pair, pair.target_path(), "fc.weight", "the target");
}

void files_cut_short(const shipped_pair & pair) {
    const std::vector<char> shipped = read(pair.drafter_path());
    const temporary_file file;
    for (int i = 1; i < 12; i++) {
        write(file.path(), shipped.data(), shipped.size() * i / 12);
        check::throws<dflash::file_error>([&] { pair.open_drafter(file.path(), shipped_params()); },
                                          "ends inside tensor", "cut in the data");
    }
    drafter_file(small_params()).write(file.path());
    const std::vector<char> small = read(file.path());
    for (size_t n = 1; n < 800; n += 37) {
        write(file.path(), small.data(), n);
        check_refused(pair, file.path(), "GGUF", "cut in the header");
    }
}

void numbers_that_make_no_graph(const shipped_pair & pair) {
    using change = std::function<void(dflash::draft_params &)>;
    const std::vector<std::pair<const char *, change>> changes = {
        {"n_embd", [](auto & p) { p.n_embd = 0; }},
        {"n_embd", [](auto & p) { p.n_embd = 1 << 30; }},
        {"n_layer", [](auto & p) { p.n_layer = 0; }},
        {"n_layer", [](auto & p) { p.n_layer = std::numeric_limits<int>::max(); }},
        {"n_head", [](auto & p) { p.n_head = -4; }},
        {"n_head_kv", [](auto & p) { p.n_head_kv = 0; }},
        {"heads", [](auto & p) { p.n_head_kv = 3; }},
        {"head_dim", [](auto & p) { p.head_dim = std::numeric_limits<int>::min(); }},
        {"block_size", [](auto & p) { p.block_size = 1; }},
        {"block_size", [](auto & p) { p.block_size = 1 << 30; }},
        {"mask_token", [](auto & p) { p.mask_token = -1; }},
        {"n_taps", [](auto & p) { p.n_taps = 0; }},
        {"sliding_window", [](auto & p) { p.sliding_window = -1; }},
        {"is_sliding", [](auto & p) { p.is_sliding = {}; }},
        {"is_sliding", [](auto & p) { p.is_sliding = {true, true}; }},
        {"rms_eps", [](auto & p) { p.rms_eps = 0.0f; }},
        {"rms_eps", [](auto & p) { p.rms_eps = NAN; }},
        {"n_dims", [](auto & p) { p.rope.n_dims = 0; }},
        {"n_dims", [](auto & p) { p.rope.n_dims = 34; }},
        {"n_dims", [](auto & p) { p.rope.n_dims = 7; }},
    };
    const temporary_file file;
    drafter_file(small_params()).write(file.path());
    for (const auto & [part, change] : changes) {
        dflash::draft_params params = small_params();
        change(params);
        check::throws<std::invalid_argument>([&] { pair.open_drafter(file.path(), params); }, part,
                                             part);
    }
}

void numbers_of_another_file(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file(small_params()).write(file.path());
    const auto check_part = [&](const dflash::draft_params & params, const char * part) {
        check::throws<dflash::file_error>([&] { pair.open_drafter(file.path(), params); }, part,
                                          part);
    };
    check_part(shipped_params(), "fc.weight");
    dflash::draft_params params = small_params();
    params.mask_token = n_vocab;
    check_part(params, "mask token");
    for (const int n_layer : {2, 1000}) {
        params = small_params();
        params.n_layer = n_layer;
        params.is_sliding.assign(n_layer, false);
        check_part(params, "blk.1.");
    }
}

// A selector cannot take more candidates than there are tokens.
void a_selector_of_too_many_candidates(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file drafter(small_params());
    drafter.add_selector();
    drafter.write(file.path());
    dflash::draft_params params = with_selector();
    pair.open_drafter(file.path(), params);
    params.selector.top_k = n_vocab + 1;
    check::throws<dflash::file_error>([&] { pair.open_drafter(file.path(), params); }, "candidates",
                                      "top_k of the selector");
}

// Tensors that are read as floats must be of a type that can be.
void heads_of_other_types(const shipped_pair & pair) {
    const temporary_file file;
    for (const ggml_type type : {GGML_TYPE_I32, GGML_TYPE_F64, GGML_TYPE_Q8_1}) {
        drafter_file with_confidence(small_params());
        with_confidence.add_markov();
        with_confidence.set_zeros("conf_proj.weight", type, {n_embd + 32, 1});
        with_confidence.write(file.path());
        check::throws<dflash::file_error>([&] { pair.open_drafter(file.path(), with_markov()); },
                                          "conf_proj.weight", "confidence");
        drafter_file convolved(small_params());
        convolved.add_selector();
        convolved.set_zeros("blk.0.attn_conv_base", type, {n_embd, 3, 2});
        convolved.write(file.path());
        check::throws<dflash::file_error>([&] { pair.open_drafter(file.path(), with_selector()); },
                                          "attn_conv_base", "base");
    }
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
    edits.push_back(with_tensor("blk.0.attn_sinks.weight", GGML_TYPE_F32, {5}));
    edits.push_back(with_tensor("blk.0.attn_sinks.weight", GGML_TYPE_F16, {4}));
    edits.push_back(with_tensor("blk.0.attn_gate.weight", GGML_TYPE_F32, {4}));
    edits.push_back(with_tensor("selector_hidden.weight", GGML_TYPE_F32, {n_embd, 8}));
    edits.push_back(with_tensor("blk.1.attn_norm.weight", GGML_TYPE_F32, {n_embd}));
    check_edits(pair, edits);
}

// ggml's writer does not write them, its reader takes them.
void tensors_without_rows(const shipped_pair & pair) {
    const temporary_file file;
    for (const std::string name : {"blk.0.ffn_gate.weight", "output.weight"}) {
        drafter_file drafter(small_params());
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
    const dflash::draft_params narrow = small_params(256);
    drafter_file(narrow).write(file.path());
    check::throws<dflash::file_error>([&] { pair.open_drafter(file.path(), narrow); }, "256 wide",
                                      "width");
}

void every_type_of_weights_drafts(const shipped_pair & pair) {
    const temporary_file good;
    drafter_file(small_params()).write(good.path());
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
        const auto d = pair.open_drafter(file.path(), small_params());
        const std::vector<float> row(d->params().n_features(), 0.5f);
        draft(*d, {{0, {1, row.data()}, 1}}, 3);
    }
}

// Its gate and its other half are matrices of one row, as which they lie side by side.
void the_narrowest_feed_forward_drafts(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file drafter(small_params());
    drafter.set("blk.0.ffn_gate.weight", GGML_TYPE_F32, {n_embd, 1});
    drafter.set("blk.0.ffn_up.weight", GGML_TYPE_F32, {n_embd, 1});
    drafter.set("blk.0.ffn_down.weight", GGML_TYPE_F32, {1, n_embd});
    drafter.write(file.path());
    const auto d = pair.open_drafter(file.path(), small_params());
    draft(*d, {{0, {}, 1}}, 3);
}

// Any bytes of the header or the data changed: a typed error, or drafts.
void damaged_files(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file(small_params()).write(file.path());
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
            const auto d = pair.open_drafter(file.path(), small_params());
            const std::vector<float> rows(3 * d->params().n_features(), 0.5f);
            draft(*d, {{0, {3, rows.data()}, 1}}, d->params().block_size - 1);
        } catch (const dflash::file_error &) {
            n_refused++;
        } catch (const dflash::backend_error &) {
            n_refused++;  // weights that put out no numbers
        }
    }
    check::that(n_refused > 50, "the damage is not where it shows");
}

const check::tests registered{
    {"drafters of the tests' making load", drafters_of_its_making_load},
    {"files that are no GGUF", files_that_are_no_gguf},
    {"files cut short", files_cut_short},
    {"numbers that make no graph", numbers_that_make_no_graph},
    {"numbers of another file", numbers_of_another_file},
    {"a selector of too many candidates", a_selector_of_too_many_candidates},
    {"heads of other types", heads_of_other_types},
    {"tensors that do not fit", tensors_that_do_not_fit},
    {"tensors without rows", tensors_without_rows},
    {"drafters of another target", drafters_of_another_target},
    {"every type of weights drafts", every_type_of_weights_drafts},
    {"the narrowest feed-forward drafts", the_narrowest_feed_forward_drafts},
    {"damaged files", damaged_files},
};

}  // namespace
