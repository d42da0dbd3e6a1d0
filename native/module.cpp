#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "copy_chances.h"
#include "copy_index.h"
#include "draft_chances.h"
#include "draft_tree.h"
#include "draw.h"
#include "errors.h"
#include "expert_products.h"
#include "experts_at_home.h"
#include "few_rows_cuda.h"
#include "few_rows_trial.h"
#include "fused_drafter.h"
#include "heads_drafter.h"
#include "joined_draft.h"
#include "llama.h"
#include "private_abi.h"
#include "target_pass.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace dflash {
namespace {

using float_rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

using byte_array = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// An array over the values of `owned`, which moves into it.
template <typename T, typename Owned>
nb::ndarray<nb::numpy, T> as_array(Owned && owned, T * values,
                                   std::initializer_list<size_t> shape) {
    using kept = std::remove_reference_t<Owned>;
    nb::capsule owner(new kept(std::move(owned)),
                      [](void * p) noexcept { delete static_cast<kept *>(p); });
    return nb::ndarray<nb::numpy, T>(values, shape, owner);
}

void raise_as(const char * name, const char * what) {
    const nb::object type = nb::module_::import_("dflash_local.errors").attr(name);
    PyErr_SetString(type.ptr(), what);
}

void translate(const std::exception_ptr & p, void *) {
    try {
        std::rethrow_exception(p);
    } catch (const file_error & e) {
        raise_as("FileError", e.what());
    } catch (const context_full_error & e) {
        raise_as("ContextFullError", e.what());
    } catch (const not_finite_error & e) {
        raise_as("NotFiniteError", e.what());
    } catch (const backend_error & e) {
        raise_as("BackendError", e.what());
    } catch (const std::invalid_argument & e) {
        raise_as("InputError", e.what());
    }
}

// Their numbers in the target's store, or rows on the host.
using given_rows = std::variant<std::vector<int64_t>, float_rows>;

feature_rows rows_of(const fused_drafter & drafter, given_rows && given) {
    if (auto * stored = std::get_if<std::vector<int64_t>>(&given)) {
        return {static_cast<int>(stored->size()), nullptr, std::move(*stored)};
    }
    const auto & rows = std::get<float_rows>(given);
    const auto width = static_cast<size_t>(drafter.params().n_features());
    if (rows.shape(1) != width) {
        throw std::invalid_argument("features are " + std::to_string(rows.shape(1)) +
                                    " wide, expected " + std::to_string(width));
    }
    if (rows.shape(0) > static_cast<size_t>(std::numeric_limits<int>::max())) {
        throw std::invalid_argument(std::to_string(rows.shape(0)) + " rows of features at once");
    }
    return {static_cast<int>(rows.shape(0)), rows.data()};
}

template <typename T>
T field(const nb::handle & object, const char * name) {
    return nb::cast<T>(object.attr(name));
}

rope_params rope_of(const nb::handle & spec) {
    rope_params rope;
    rope.n_dims = field<int>(spec, "n_dims");
    rope.n_ctx_orig = field<int>(spec, "original_context");
    rope.freq_base = field<float>(spec, "freq_base");
    rope.freq_scale = 1.0f / field<float>(spec, "factor");
    rope.ext_factor = field<std::string>(spec, "scaling") == "yarn" ? 1.0f : 0.0f;
    rope.attn_factor = field<float>(spec, "attn_factor");
    return rope;
}

// The numbers of a `gguf.drafter_spec.DrafterSpec`.
draft_params params_of(const nb::handle & spec) {
    draft_params params;
    params.n_embd = field<int>(spec, "n_embd");
    params.n_layer = field<int>(spec, "n_layer");
    params.n_head = field<int>(spec, "n_head");
    params.n_head_kv = field<int>(spec, "n_head_kv");
    params.head_dim = field<int>(spec, "head_dim");
    params.block_size = field<int>(spec, "block_size");
    params.mask_token = field<int>(spec, "mask_token_id");
    params.n_taps = field<int>(spec, "n_taps");
    params.sliding_window = field<int>(spec, "sliding_window");
    params.is_sliding = field<std::vector<bool>>(spec, "sliding_layers");
    const nb::object scales = spec.attr("scales");
    params.rms_eps = field<float>(scales, "rms_eps");
    params.attention_scale = field<float>(scales, "attention");
    params.value_scale = field<float>(scales, "value");
    params.embedding_scale = field<float>(scales, "embedding");
    params.logit_scale = field<float>(scales, "logit");
    params.logit_cap = field<float>(scales, "logit_softcap");
    params.gelu = field<std::string>(scales, "activation") == "gelu";
    params.values_from_keys = field<bool>(spec, "values_from_keys");
    params.causal = field<bool>(spec, "causal");
    params.from_anchor = field<bool>(spec, "sample_from_anchor");
    params.markov_rank = field<int>(spec, "markov_rank");
    params.rope = rope_of(spec.attr("rope"));
    const nb::object selector = spec.attr("selector");
    if (!selector.is_none()) {
        params.selector.rank = field<int>(selector, "rank");
        params.selector.top_k = field<int>(selector, "top_k");
        params.selector.kernel_size = field<int>(selector, "kernel_size");
        params.selector.group_size = field<int>(selector, "group_size");
    }
    return params;
}

std::unique_ptr<fused_drafter> open_drafter(uintptr_t model, const target_pass * pass,
                                            const std::filesystem::path & path,
                                            const nb::handle & spec, int n_seq, int n_ctx,
                                            int top_k, int n_threads, int draft_window,
                                            std::shared_ptr<thread_pool> threads) {
    const draft_params params = params_of(spec);
    const nb::gil_scoped_release release;
    return std::make_unique<fused_drafter>(reinterpret_cast<const llama_model *>(model),
                                           pass != nullptr ? pass->store() : nullptr,
                                           path.u8string(), params, n_seq, n_ctx, top_k, n_threads,
                                           draft_capabilities{}, draft_window, std::move(threads));
}

void inject(fused_drafter & self, int seq, given_rows features) {
    const feature_rows rows = rows_of(self, std::move(features));
    const nb::gil_scoped_release release;
    self.inject(seq, rows);
}

template <typename Drafter>
nb::ndarray<nb::numpy, uint8_t> save(const Drafter & self, int seq) {
    const size_t n = self.n_saved_bytes(seq);
    auto out = std::unique_ptr<uint8_t[]>(new uint8_t[n]);  // not zeroed first
    {
        const nb::gil_scoped_release release;
        self.save(seq, out.get());
    }
    return as_array(std::move(out), out.get(), {n});
}

template <typename Drafter>
void restore(Drafter & self, int seq, const byte_array & saved) {
    const nb::gil_scoped_release release;
    self.restore(seq, saved.data(), saved.size());
}

void begin_draft(fused_drafter & self, const std::vector<int> & seqs,
                 std::vector<given_rows> features, const std::vector<int32_t> & anchors,
                 int n_draft) {
    if (features.size() != seqs.size() || anchors.size() != seqs.size()) {
        throw std::invalid_argument("give one piece of features and one anchor for each sequence");
    }
    std::vector<draft_request> requests;
    for (size_t i = 0; i < seqs.size(); i++) {
        requests.push_back({seqs[i], rows_of(self, std::move(features[i])), anchors[i]});
    }
    const nb::gil_scoped_release release;
    self.begin(requests, n_draft);
}

nb::tuple read_draft(fused_drafter & self) {
    drafts found;
    {
        const nb::gil_scoped_release release;
        found = self.read();
    }
    auto & [n_draft, ids, logprobs, steps] = found;
    const auto k = static_cast<size_t>(self.top_k());
    const size_t n = ids.size() / (n_draft * k);
    nb::object of_steps = nb::none();
    if (!steps.empty()) {
        of_steps = nb::cast(as_array(std::move(steps), steps.data(), {n, n_draft, k, k}));
    }
    return nb::make_tuple(as_array(std::move(ids), ids.data(), {n, n_draft, k}),
                          as_array(std::move(logprobs), logprobs.data(), {n, n_draft, k}),
                          of_steps);
}

// The numbers of a `gguf.drafter_spec.HeadLayerSpec`.
heads_params heads_params_of(const nb::handle & spec, int n_draft) {
    heads_params params;
    params.layer = field<int>(spec, "layer");
    params.n_embd = field<int>(spec, "n_embd");
    params.n_head = field<int>(spec, "n_head");
    params.n_head_kv = field<int>(spec, "n_head_kv");
    params.head_dim = field<int>(spec, "head_dim");
    params.n_expert_used = field<int>(spec, "n_expert_used");
    params.n_draft = n_draft;
    params.rms_eps = field<float>(spec, "rms_eps");
    params.expert_scale = field<float>(spec, "expert_scale");
    params.is_gated = field<bool>(spec, "is_gated");
    params.by_sigmoid = field<bool>(spec, "by_sigmoid");
    params.adds_to_one = field<bool>(spec, "adds_to_one");
    params.rope = rope_of(spec.attr("rope"));
    return params;
}

std::unique_ptr<heads_drafter> open_heads(uintptr_t model, const target_pass & pass,
                                          const nb::handle & spec, int n_draft, int n_seq,
                                          int n_ctx, int n_threads,
                                          std::shared_ptr<thread_pool> threads) {
    const heads_params params = heads_params_of(spec, n_draft);
    const nb::gil_scoped_release release;
    return std::make_unique<heads_drafter>(reinterpret_cast<const llama_model *>(model),
                                           pass.store(), params, n_seq, n_ctx, n_threads,
                                           std::move(threads));
}

void inject_into_heads(heads_drafter & self, int seq, std::vector<int32_t> tokens,
                       std::vector<int64_t> stored) {
    const nb::gil_scoped_release release;
    self.inject(seq, {std::move(tokens), std::move(stored)});
}

nb::tuple draft_with_heads(heads_drafter & self, const std::vector<int> & seqs,
                           std::vector<std::vector<int32_t>> tokens,
                           std::vector<std::vector<int64_t>> stored,
                           const std::vector<int32_t> & anchors, int n_draft) {
    const size_t n = seqs.size();
    if (tokens.size() != n || stored.size() != n || anchors.size() != n) {
        throw std::invalid_argument("give tokens, rows and one anchor for each sequence");
    }
    std::vector<heads_request> requests;
    for (size_t i = 0; i < n; i++) {
        requests.push_back({seqs[i], {std::move(tokens[i]), std::move(stored[i])}, anchors[i]});
    }
    heads_drafts found;
    {
        const nb::gil_scoped_release release;
        found = self.draft(std::move(requests), n_draft);
    }
    auto & [ids, logprobs] = found;
    const auto n_each = static_cast<size_t>(n_draft);
    return nb::make_tuple(as_array(std::move(ids), ids.data(), {n, n_each}),
                          as_array(std::move(logprobs), logprobs.data(), {n, n_each}));
}

using id_lists = std::vector<std::vector<int32_t>>;

std::unique_ptr<target_pass> open_pass(uintptr_t context, int n_seq, std::vector<int32_t> layers,
                                       int n_stored, bool in_graph, int n_branches, int n_returned,
                                       std::shared_ptr<thread_pool> threads) {
    auto * ctx = reinterpret_cast<llama_context *>(context);
    std::unique_ptr<state_replay> replay;
    if (n_returned > 0) {
        replay = std::make_unique<state_replay>(ctx, n_returned, std::move(threads));
    }
    return std::make_unique<target_pass>(ctx, n_seq, std::move(layers), n_stored, in_graph,
                                         n_branches, std::move(replay));
}

bool can_replay(uintptr_t context) {
    auto * ctx = reinterpret_cast<llama_context *>(context);
    return ctx == nullptr ? private_abi::doubt_memory().empty()
                          : private_abi::hybrid_memory::of(ctx).is_known();
}

// Why some of llama.cpp and ggml is not as it is used beyond their headers; see private_abi.h.
std::vector<std::string> private_doubts() {
    std::vector<std::string> found;
    for (const std::string & doubt :
         {private_abi::doubt_graphs(), private_abi::doubt_memory(), private_abi::doubt_order()}) {
        if (!doubt.empty()) {
            found.push_back(doubt);
        }
    }
    return found;
}

int decode(target_pass & self, const std::vector<int32_t> & tokens,
           const std::vector<int32_t> & positions, const std::vector<int32_t> & seqs,
           const std::vector<bool> & output, id_lists ids, std::optional<float_rows> states) {
    const size_t n = tokens.size();
    if (positions.size() != n || seqs.size() != n || output.size() != n) {
        throw std::invalid_argument("each token has one position, one sequence and one flag");
    }
    if (!ids.empty() && ids.size() != n) {
        throw std::invalid_argument("ids are given for all rows or for none");
    }
    if (states &&
        (states->shape(0) != n || states->shape(1) != static_cast<size_t>(self.n_embd()))) {
        throw std::invalid_argument("states are given for all rows or for none");
    }
    const nb::gil_scoped_release release;
    ids.resize(n);
    std::vector<batch_row> rows(n);
    for (size_t i = 0; i < n; i++) {
        rows[i] = {tokens[i], positions[i], seqs[i], output[i], std::move(ids[i])};
    }
    return self.decode(rows, states ? states->data() : nullptr);
}

int decode_embeddings(target_pass & self, float_rows rows, const std::vector<int32_t> & positions,
                      int32_t seq, bool is_causal) {
    const llama_model * model = llama_get_model(self.context());
    if (rows.shape(1) != static_cast<size_t>(llama_model_n_embd_inp(model))) {
        throw std::invalid_argument("rows of " + std::to_string(rows.shape(1)) +
                                    " values; this target takes " +
                                    std::to_string(llama_model_n_embd_inp(model)));
    }
    const nb::gil_scoped_release release;
    return self.decode_embeddings(rows.data(), static_cast<int>(rows.shape(0)), positions, seq,
                                  is_causal);
}

nb::tuple decode_ahead(target_pass & self, const std::vector<int32_t> & tokens,
                       const std::vector<int32_t> & positions, const std::vector<int32_t> & seqs,
                       int n_steps, const std::vector<token_draw *> & draws,
                       const std::vector<int32_t> & given) {
    const size_t n = tokens.size();
    if (positions.size() != n || seqs.size() != n) {
        throw std::invalid_argument("each token has one position and one sequence");
    }
    std::vector<batch_row> rows(n);
    for (size_t i = 0; i < n; i++) {
        rows[i] = {tokens[i], positions[i], seqs[i], true, {}};
    }
    std::vector<int32_t> out;
    int status = 0;
    {
        const nb::gil_scoped_release release;
        status = self.decode_ahead(std::move(rows), n_steps, draws, given, out);
    }
    return nb::make_tuple(status, out);
}

nb::ndarray<nb::numpy, float> logits(target_pass & self, int output_row) {
    std::vector<float> out;
    {
        const nb::gil_scoped_release release;
        out = self.logits(output_row);
    }
    return as_array(std::move(out), out.data(), {out.size()});
}

nb::tuple candidates(target_pass & self, int output_row, int k) {
    std::vector<int32_t> ids;
    std::vector<float> logits;
    {
        const nb::gil_scoped_release release;
        self.candidates(output_row, k, ids, logits);
    }
    const size_t n = ids.size();
    return nb::make_tuple(as_array(std::move(ids), ids.data(), {n}),
                          as_array(std::move(logits), logits.data(), {n}));
}

std::vector<int32_t> best(target_pass & self) {
    std::vector<int32_t> found(self.n_outputs());
    for (int row = 0; row < self.n_outputs(); row++) {
        found[row] = self.best(row);
    }
    return found;
}

// The likeliest token takes less time than to let other threads run.
int32_t draw(target_pass & self, token_draw * how, int output_row) {
    if (how == nullptr || how->needs() == draw_needs::best) {
        return self.draw(how, output_row);
    }
    const nb::gil_scoped_release release;
    return self.draw(how, output_row);
}

nb::ndarray<nb::numpy, float> hidden_states(const target_pass & self,
                                            const std::vector<int64_t> & rows) {
    if (self.store() == nullptr) {
        throw std::invalid_argument("no layers are tapped");
    }
    const auto width = static_cast<size_t>(self.store()->n_features());
    auto out = std::make_unique<float[]>(rows.size() * width);
    {
        const nb::gil_scoped_release release;
        self.store()->read(rows, out.get());
    }
    return as_array(std::move(out), out.get(), {rows.size(), width});
}

// Cuts: (id, from position). Copies: (source id, target id, from position, to position).
using cuts = std::vector<std::pair<int32_t, int32_t>>;
using copies = std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t>>;

void edit_cells(uintptr_t context, const cuts & cut, const copies & copied) {
    const nb::gil_scoped_release release;
    const auto * ctx = reinterpret_cast<llama_context *>(context);
    const auto known = [n = static_cast<int32_t>(llama_n_seq_max(ctx))](int32_t id) {
        if (id < 0 || id >= n) {  // llama.cpp asserts it
            throw std::invalid_argument("id " + std::to_string(id) + " is not in 0 .. " +
                                        std::to_string(n - 1));
        }
        return id;
    };
    llama_memory_t memory = llama_get_memory(ctx);
    for (const auto & [id, begin] : cut) {
        if (!llama_memory_seq_rm(memory, known(id), begin, -1)) {  // a recurrent state's middle
            throw backend_error("the model cannot forget positions " + std::to_string(begin) +
                                " and up of id " + std::to_string(id));
        }
    }
    for (const auto & [from, to, begin, end] : copied) {
        llama_memory_seq_cp(memory, known(from), known(to), begin, end);
    }
}

using float_row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::unique_ptr<token_draw> open_draw(int n_vocab, uintptr_t bias_chain, uintptr_t filter_chain,
                                      uintptr_t pick_chain, int top_k, float top_p, float min_p,
                                      bool reorders, float most_raised, float temperature,
                                      uint32_t seed, int n_candidates, bool bound) {
    const auto own = [](uintptr_t address) {
        return llama_sampler_ptr(reinterpret_cast<llama_sampler *>(address));
    };
    return std::make_unique<token_draw>(
        draw_rule{n_vocab, own(bias_chain), own(filter_chain), own(pick_chain), top_k, top_p, min_p,
                  reorders, most_raised, temperature, seed, n_candidates, bound});
}

int32_t draw_from_row(token_draw & self, const float_row & logits) {
    if (logits.shape(0) != static_cast<size_t>(self.rule().n_vocab)) {
        throw std::invalid_argument("a row of " + std::to_string(logits.shape(0)) + " logits");
    }
    const nb::gil_scoped_release release;
    const int32_t token = self.from_row(logits.data());
    self.settle(token);
    return token;
}

void accept_tokens(token_draw & self, const std::vector<int32_t> & tokens) {
    for (const int32_t token : tokens) {
        self.accept(token);
    }
}

nb::tuple list_few_rows_gpus() {
    std::string why_not;
    nb::list found;
    for (const few_rows_gpu & gpu : few_rows_gpus(why_not)) {
        found.append(nb::make_tuple(gpu.device, gpu.architecture, gpu.description));
    }
    return nb::make_tuple(found, why_not);
}

few_rows_engine::cubins kernels_of(const nb::list & cubins) {
    few_rows_engine::cubins all;
    for (const nb::handle & cubin : cubins) {
        const auto bytes = nb::cast<nb::bytes>(cubin);
        all.emplace_back(bytes.c_str(), bytes.size());
    }
    return all;
}

template <typename Try>
nb::dict run_trial(Try && run) {
    few_rows_trial found;
    {
        const nb::gil_scoped_release release;
        found = run();
    }
    nb::dict all;
    all["columns"] = found.columns;
    all["ours_us"] = found.ours_us;
    all["ggml_us"] = found.ggml_us;
    all["error"] = found.error;
    all["same_bits"] = found.same_bits;
    return all;
}

nb::dict run_few_rows_trial(const std::string & device, const nb::list & cubins, int type,
                            int64_t k, int64_t rows) {
    return run_trial([&, kernels = kernels_of(cubins)]() mutable {
        return try_few_rows(device, std::move(kernels), static_cast<ggml_type>(type), k, rows);
    });
}

nb::dict run_attention_trial(const std::string & device, const nb::list & cubins, int keys,
                             int values, int head_dim, int n_heads, int n_kv_heads) {
    return run_trial([&, kernels = kernels_of(cubins)]() mutable {
        return try_few_rows_attention(device, std::move(kernels), static_cast<ggml_type>(keys),
                                      static_cast<ggml_type>(values), head_dim, n_heads,
                                      n_kv_heads);
    });
}

nb::dict run_experts_trial(const std::string & device, const nb::list & cubins, int type, int64_t k,
                           int64_t rows, int n_experts, int n_used) {
    return run_trial([&, kernels = kernels_of(cubins)]() mutable {
        return try_few_rows_experts(device, std::move(kernels), static_cast<ggml_type>(type), k,
                                    rows, n_experts, n_used);
    });
}

nb::dict count_few_rows(few_rows_engine & self) {
    const few_rows_counts & counts = self.counts();
    nb::dict all;
    all["repeated"] = counts.repeated.load();
    all["direct"] = counts.direct.load();
    all["recorded"] = counts.recorded.load();
    all["played"] = counts.played.load();
    all["products"] = counts.products.load();
    all["fused"] = counts.fused.load();
    all["launches"] = counts.launches.load();
    all["conversions"] = counts.conversions.load();
    all["attentions"] = counts.attentions.load();
    all["experts"] = counts.experts.load();
    return all;
}

// Which backends a thread opens is decided by scopes, which Python enters and leaves by name.
class few_rows_scopes {
  public:
    void enter(std::shared_ptr<few_rows_engine> engine, bool on_cpu) {
        scope_ = std::make_unique<few_rows_scope>(std::move(engine), on_cpu);
    }
    void leave() { scope_.reset(); }

  private:
    std::unique_ptr<few_rows_scope> scope_;
};

using id_rows = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

using step_rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

nb::tuple grow_nodes(const id_rows & ids, const float_rows & logprobs, int n_vocab, int n_nodes,
                     int n_leaves, int n_depth, const std::optional<step_rows> & steps,
                     const std::optional<std::vector<double>> & chances, double further_share) {
    const size_t n = ids.shape(0), k = ids.shape(1);
    if (n != logprobs.shape(0) || k != logprobs.shape(1)) {
        throw std::invalid_argument("each candidate has one id and one log-probability");
    }
    if (steps && (steps->shape(0) != n || steps->shape(1) != k || steps->shape(2) != k)) {
        throw std::invalid_argument("each step has one log-probability");
    }
    if (!(further_share > 0.0 && further_share <= 1.0)) {
        throw std::invalid_argument("a share is above 0, and at most 1");
    }
    std::vector<float> rated, rated_steps;
    if (chances && n * k > 0) {
        if (chances->size() != n) {
            throw std::invalid_argument("the first candidate of each position has one chance");
        }
        rated.assign(logprobs.data(), logprobs.data() + n * k);
        if (steps) {
            rated_steps.assign(steps->data(), steps->data() + n * k * k);
        }
        rate_candidates(rated.data(), steps ? rated_steps.data() : nullptr, *chances,
                        static_cast<int>(k));
    }
    const float * of_steps = steps ? steps->data() : nullptr;
    const draft_tree tree =
        grow_tree(ids.data(), rated.empty() ? logprobs.data() : rated.data(),
                  rated_steps.empty() ? of_steps : rated_steps.data(), static_cast<int>(n),
                  static_cast<int>(k), n_vocab, {n_nodes, n_leaves, n_depth}, further_share);
    return nb::make_tuple(tree.tokens, tree.parents, tree.logprobs);
}

nb::tuple join_nodes(
    const std::vector<int32_t> & tokens, const std::vector<int32_t> & parents,
    const std::vector<double> & chances,
    const std::vector<std::pair<std::vector<int32_t>, std::vector<double>>> & copies, int n_nodes,
    int n_leaves) {
    if (tokens.size() != parents.size()) {
        throw std::invalid_argument("each node has a token and a parent");
    }
    for (size_t i = 0; i < parents.size(); i++) {
        if (parents[i] < -1 || parents[i] >= static_cast<int64_t>(i)) {
            throw std::invalid_argument("a parent stands before its children");
        }
    }
    std::vector<copied_text> texts;
    for (const auto & [copied, likely] : copies) {
        if (copied.size() != likely.size()) {
            throw std::invalid_argument("each copied token has a chance");
        }
        texts.push_back({copied, likely});
    }
    const joined_draft draft = join_copies(tokens, parents, chances, texts, n_nodes, n_leaves);
    return nb::make_tuple(draft.tokens, draft.parents, draft.logprobs, draft.copied, draft.chances);
}

using kind_list = std::vector<int32_t>;

const kind_list & known_kinds(const kind_list & kinds) {
    for (const int32_t kind : kinds) {
        if (kind < 0 || kind >= n_copy_kinds) {
            throw std::invalid_argument("no kind of a copied token: " + std::to_string(kind));
        }
    }
    return kinds;
}

const std::vector<double> & by_kind(const std::vector<double> & numbers) {
    if (numbers.size() != n_copy_kinds) {
        throw std::invalid_argument("each kind of a copied token has one number");
    }
    return numbers;
}

using least_array = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool find_offers(copy_offers & self, copy_index & index, int n_copies, int n_tokens,
                 const std::optional<least_array> & least) {
    return self.find(index, n_copies, n_tokens, least ? least->data() : nullptr,
                     least ? least->size() : 0);
}

nb::list last_offers(const copy_offers & self) {
    nb::list found;
    for (const copy_offers::offer & o : self.last) {
        found.append(nb::make_tuple(o.tokens, o.kinds, o.chances));
    }
    return found;
}

void take_kinds(copy_offers & self, const std::vector<std::pair<kind_list, kind_list>> & judged) {
    self.last.clear();
    for (const auto & [tokens, kinds] : judged) {
        if (tokens.size() != kinds.size()) {
            throw std::invalid_argument("each copied token has one kind");
        }
        self.last.push_back({tokens, known_kinds(kinds), {}});
    }
}

}  // namespace
}  // namespace dflash

NB_MODULE(_native, m) {
    using namespace dflash;
    // A fork of a process that has a model leaves it as it is: its threads are not there.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(translate);

    m.def(
        "llama_decode_address", [] { return reinterpret_cast<uintptr_t>(&llama_decode); },
        "Address of llama_decode as this extension sees it.");

    m.attr("PRIVATE_DOUBTS") = private_doubts();  // looked at once, at import
    m.def("can_replay", &can_replay, nb::arg("context") = 0,
          "Whether rows of a recurrent llama_context can be taken back by replay; without one, "
          "whether this build of llama.cpp allows it.");
    m.def(
        "keep_states_of_all_rows",
        [](uintptr_t context) {
            private_abi::keep_states_of_all_rows(reinterpret_cast<llama_context *>(context));
        },
        nb::arg("context"), "Let a target compute what its heads read for each row of a pass.");
    m.def("edit_cells", &edit_cells, nb::arg("context"), nb::arg("cuts"), nb::arg("copies"),
          "In a llama_context's cache: ids lose what they have from a position on, then take over "
          "positions of others, from and to.");
    m.def(
        "grow_tree", &grow_nodes, nb::arg("ids"), nb::arg("logprobs"), nb::arg("n_vocab"),
        nb::arg("n_nodes"), nb::arg("n_leaves"), nb::arg("n_depth"),
        nb::arg("steps").none() = nb::none(), nb::arg("chances").none() = nb::none(),
        nb::arg("further_share") = 1.0,
        "Tokens, parents and log-probabilities of the best tree. See dflash_local/draft/tree.py.");
    m.def(
        "join_copies", &join_nodes, nb::arg("tokens"), nb::arg("parents"), nb::arg("chances"),
        nb::arg("copies"), nb::arg("n_nodes"), nb::arg("n_leaves"),
        "Tokens, parents, log-probabilities, whether it is a copy, and chance of each node of the "
        "best draft. See dflash_local/copies/join.py.");

    nb::class_<draft_chances>(m, "DraftChances", "What is known of a drafter's first choices.")
        .def(nb::init<const draft_chances::numbers &, double, double>(), nb::arg("state"),
             nb::arg("walk"), nb::arg("most"))
        .def("each", &draft_chances::each, nb::arg("logprobs"),
             "The chance of each token of a chain, if all before it are accepted.")
        .def("learn", &draft_chances::learn, nb::arg("logprobs"), nb::arg("n_right"))
        .def_ro("state", &draft_chances::state);

    nb::class_<copy_index>(m, "CopyIndex", "What a text may repeat. See native/copy_index.h.")
        .def(nb::init<>())
        .def("extend", nb::overload_cast<const std::vector<int32_t> &>(&copy_index::extend),
             nb::arg("tokens"))
        .def("extend_by", nb::overload_cast<const copy_index &>(&copy_index::extend),
             nb::arg("other"))
        .def("goes_on", &copy_index::goes_on, nb::arg("other"))
        .def("begins_with", &copy_index::begins_with, nb::arg("other"))
        .def("__len__", &copy_index::size)
        .def_prop_ro("n_bytes", &copy_index::n_bytes)
        .def_ro_static("n_cells", &copy_index::n_cells);
    m.attr("N_COPY_KINDS") = n_copy_kinds;

    nb::class_<copy_prior>(m, "CopyPrior", "See dflash_local/copies/chances.py.")
        .def(nb::init<>())
        .def_prop_rw(
            "tried", [](const copy_prior & self) { return self.tried; },
            [](copy_prior & self, const std::vector<double> & n) { self.tried = by_kind(n); })
        .def_prop_rw(
            "right", [](const copy_prior & self) { return self.right; },
            [](copy_prior & self, const std::vector<double> & n) { self.right = by_kind(n); });

    nb::class_<copy_chances>(m, "CopyChances", "What is known of one request's copies.")
        .def(nb::init<copy_prior &>(), nb::arg("prior"), nb::keep_alive<1, 2>())
        .def(
            "each",
            [](copy_chances & self, const kind_list & kinds) {
                return self.each(known_kinds(kinds));
            },
            nb::arg("kinds"), "The chance of each token that it is right where all before it are.");

    nb::class_<copy_offers>(m, "CopyOffers", "What was offered last. See native/copy_chances.h.")
        .def(nb::init<copy_prior &>(), nb::arg("prior"), nb::keep_alive<1, 2>())
        .def("learn", &copy_offers::learn, nb::arg("index"), nb::arg("written"))
        .def("find", &find_offers, nb::arg("index"), nb::arg("n_copies"), nb::arg("n_tokens"),
             nb::arg("least").none() = nb::none())
        .def("take_kinds", &take_kinds, nb::arg("offers"),
             "Tokens and other kinds of the last offers.")
        .def_prop_ro("last", &last_offers, "Tokens, kinds and chances of each.")
        .def_ro("chances", &copy_offers::chances);

    nb::class_<token_draw>(m, "TokenDraw", "How tokens are drawn. See native/draw.h.")
        .def(nb::new_(&open_draw), nb::arg("n_vocab"), nb::arg("bias_chain"),
             nb::arg("filter_chain"), nb::arg("pick_chain"), nb::arg("top_k"), nb::arg("top_p"),
             nb::arg("min_p"), nb::arg("reorders"), nb::arg("most_raised"), nb::arg("temperature"),
             nb::arg("seed"), nb::arg("n_candidates"), nb::arg("bound"),
             "Three chains of llama.cpp by their addresses, 0 for none. This frees them, also if "
             "it throws.")
        .def("from_row", &draw_from_row, nb::arg("logits"),
             "A token from float32 [n_vocab]; -2: none is left.")
        .def("accept", &accept_tokens, nb::arg("tokens"), "Let penalties look back on these.");

    nb::class_<thread_pool>(m, "ThreadPool",
                            "Threads that compute on the CPU. See native/thread_pool.h.")
        .def(nb::init<int>(), nb::arg("n_threads"))
        .def(
            "attach",
            [](const thread_pool & self, uintptr_t context) {
                self.attach(reinterpret_cast<llama_context *>(context));
            },
            nb::arg("context"))
        .def("use", &thread_pool::use, nb::arg("n"));

    m.def("few_rows_source", &few_rows_source, "The text of the kernels, for NVRTC.");
    m.def("few_rows_gpus", &list_few_rows_gpus,
          "Name, architecture and description of each GPU that they may run on, and why there are "
          "none.");
    m.def(
        "has_experts_in_ram",
        [](uintptr_t model) {
            return has_experts_in_ram(reinterpret_cast<const llama_model *>(model));
        },
        nb::arg("model"));
    m.def("keep_experts_at_home", &keep_experts_at_home, nb::arg("n_threads"));
    m.def("speed_up_experts", &speed_up_experts,
          "Run products with experts of MXFP4 in RAM by kernels of our own. Empty, or why not. See "
          "native/expert_products.h.");
    m.def("n_expert_products", &n_expert_products, "Products with experts done so.");
    m.attr("most_rows_at_home") = most_rows_at_home;
    m.def("n_experts_kept", &n_experts_kept,
          "Products by experts that stayed on the CPU though a GPU would have taken them.");
    m.def("few_rows_driver", &few_rows_driver, "The driver's version: 12040 for CUDA 12.4.");
    m.def(
        "few_rows_operand",
        [](int type, int64_t k) { return few_rows_operand(static_cast<ggml_type>(type), k); },
        nb::arg("type"), nb::arg("k"),
        "What kernels call matrices of this type with rows of k elements; empty: there are none.");
    m.def(
        "few_rows_attention",
        [](int keys, int values, int head_dim) {
            return few_rows_attention(static_cast<ggml_type>(keys), static_cast<ggml_type>(values),
                                      head_dim);
        },
        nb::arg("keys"), nb::arg("values"), nb::arg("head_dim"),
        "What kernels of attention are called for caches of these types; empty: there are none.");
    m.def("try_few_rows_attention", &run_attention_trial, nb::arg("device"), nb::arg("cubins"),
          nb::arg("keys"), nb::arg("values"), nb::arg("head_dim"), nb::arg("n_heads"),
          nb::arg("n_kv_heads"),
          "Times, error and equality of our attention. See native/few_rows_trial.h.");
    m.def("try_few_rows_experts", &run_experts_trial, nb::arg("device"), nb::arg("cubins"),
          nb::arg("type"), nb::arg("k"), nb::arg("rows"), nb::arg("n_experts"), nb::arg("n_used"),
          "Times, error and equality of our products with experts. See native/few_rows_trial.h.");
    m.def("try_few_rows", &run_few_rows_trial, nb::arg("device"), nb::arg("cubins"),
          nb::arg("type"), nb::arg("k"), nb::arg("rows"),
          "Times, error and equality of our products. See native/few_rows_trial.h.");
    nb::class_<few_rows_engine>(m, "FewRows",
                                "Products of few rows on the GPUs. See native/few_rows.h.")
        .def(nb::init<>())
        .def(
            "add",
            [](few_rows_engine & self, const std::string & device, const nb::list & cubins) {
                self.add(device, kernels_of(cubins));
            },
            nb::arg("device"), nb::arg("cubins"))
        .def(
            "leave",
            [](few_rows_engine & self, int type, int64_t k, int64_t rows, int64_t first,
               int64_t last) { self.leave(static_cast<ggml_type>(type), k, rows, {first, last}); },
            nb::arg("type"), nb::arg("k"), nb::arg("rows"), nb::arg("first"), nb::arg("last"))
        .def(
            "leave_attention",
            [](few_rows_engine & self, int keys, int values, int head_dim) {
                self.leave_attention(static_cast<ggml_type>(keys), static_cast<ggml_type>(values),
                                     head_dim);
            },
            nb::arg("keys"), nb::arg("values"), nb::arg("head_dim"))
        .def(
            "leave_experts",
            [](few_rows_engine & self, int type, int64_t k, int64_t rows, int64_t first,
               int64_t last) {
                self.leave_experts(static_cast<ggml_type>(type), k, rows, {first, last});
            },
            nb::arg("type"), nb::arg("k"), nb::arg("rows"), nb::arg("first"), nb::arg("last"))
        .def("turn", &few_rows_engine::turn, nb::arg("on"))
        .def_prop_ro("reason", &few_rows_engine::reason)
        .def_prop_ro("counts", &count_few_rows);
    nb::class_<few_rows_scopes>(m, "FewRowsScope",
                                "From `enter` to `leave` the backends that this thread opens run "
                                "their graphs by a FewRows.")
        .def(nb::init<>())
        .def("enter", &few_rows_scopes::enter, nb::arg("engine"), nb::arg("on_cpu") = false)
        .def("leave", &few_rows_scopes::leave);

    nb::class_<target_pass>(
        m, "TargetPass",
        "Passes through a llama_context, given by its address. See native/target_pass.h.")
        .def(nb::new_(&open_pass), nb::arg("context"), nb::arg("n_seq"), nb::arg("layers"),
             nb::arg("n_stored"), nb::arg("in_graph"), nb::arg("n_branches") = 1,
             nb::arg("n_returned") = 0, nb::arg("threads").none() = nb::none())
        .def("draw_alike", &target_pass::draw_alike)
        .def_prop_ro("can_keep", &target_pass::can_keep)
        .def("keep", &target_pass::keep, nb::arg("seq"), nb::arg("n_kept"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("start_replay", &target_pass::start_replay, nb::call_guard<nb::gil_scoped_release>())
        .def("wait", &target_pass::wait, nb::call_guard<nb::gil_scoped_release>())
        .def("decode", &decode, nb::arg("tokens"), nb::arg("positions"), nb::arg("seqs"),
             nb::arg("output"), nb::arg("ids") = id_lists{}, nb::arg("states").none() = nb::none(),
             "Status of llama_decode. `states` float32 [n, n_embd] come with the tokens of heads.")
        .def("decode_embeddings", &decode_embeddings, nb::arg("rows"), nb::arg("positions"),
             nb::arg("seq"), nb::arg("is_causal"), "Status of llama_decode.")
        .def("decode_ahead", &decode_ahead, nb::arg("tokens"), nb::arg("positions"),
             nb::arg("seqs"), nb::arg("n_steps"), nb::arg("draws"), nb::arg("given"),
             "Status of llama_decode, and what is drawn step by step.")
        .def("draw", &draw, nb::arg("how").none(), nb::arg("output_row"),
             "A token; -1: the logits are not finite numbers, -2: none is left.")
        .def_prop_ro("draw_s", &target_pass::draw_s)
        .def_prop_ro("n_whole_rows", &target_pass::n_whole_rows)
        .def_prop_ro("best", &best, "Likeliest token of each output row; -1: none.")
        .def("logits", &logits, nb::arg("output_row"), "float32 [n_vocab]")
        .def("candidates", &candidates, nb::arg("output_row"), nb::arg("k"),
             "The k largest logits of a row: ids int32 [k], logits float32 [k], largest first.")
        .def("log_sum", &target_pass::log_sum, nb::arg("output_row"))
        .def_rw("search_on_cpu", &target_pass::search_on_cpu)
        .def("hidden_states", &hidden_states, nb::arg("rows"),
             "float32 [n_rows, n_taps * n_embd], of rows by their numbers in the store.")
        .def_prop_ro("first_stored", &target_pass::first_stored)
        .def_prop_ro("n_tapped", &target_pass::n_tapped)
        .def_prop_ro(
            "n_stored",
            [](const target_pass & p) { return p.store() != nullptr ? p.store()->n_rows() : 0; })
        .def_prop_ro("n_rebuilds", &target_pass::n_rebuilds);

    nb::class_<fused_drafter>(
        m, "FusedDrafter", "A drafter file at work on a llama_model. See native/fused_drafter.h.")
        .def(nb::new_(&open_drafter), nb::arg("model"), nb::arg("target_pass").none(),
             nb::arg("path"), nb::arg("spec"), nb::arg("n_seq"), nb::arg("n_ctx"), nb::arg("top_k"),
             nb::arg("n_threads"), nb::arg("draft_window") = 0,
             nb::arg("threads").none() = nb::none(),
             "`spec`: the numbers that Python has read from the keys of the file at `path`.")
        .def_prop_ro("n_builds", &fused_drafter::n_builds)
        .def_prop_ro("n_cache_bytes", &fused_drafter::n_cache_bytes)
        .def_prop_rw("n_rounds", &fused_drafter::n_rounds, &fused_drafter::set_n_rounds)
        .def("length", &fused_drafter::length, nb::arg("seq"))
        .def("inject", &inject, nb::arg("seq"), nb::arg("features"))
        .def("begin", &begin_draft, nb::arg("seqs"), nb::arg("features"), nb::arg("anchors"),
             nb::arg("n_draft"))
        .def("read", &read_draft,
             "ids int32 and log-probabilities float32, both [n_seqs, n_draft, top_k], best first; "
             "and those of each candidate after each one of the position before, [n_seqs, n_draft, "
             "top_k, top_k], or None if positions do not depend on one another.")
        .def_prop_ro("top_k", &fused_drafter::top_k)
        .def("truncate", &fused_drafter::truncate, nb::arg("seq"), nb::arg("length"))
        .def("copy", &fused_drafter::copy, nb::arg("source"), nb::arg("target"), nb::arg("length"))
        .def("n_visible", &fused_drafter::n_visible, nb::arg("seq"), nb::arg("length"))
        .def("save", &save<fused_drafter>, nb::arg("seq"),
             "The rows of a sequence, uint8 [n], for `restore`.")
        .def("restore", &restore<fused_drafter>, nb::arg("seq"), nb::arg("saved"));

    nb::class_<heads_drafter>(m, "HeadsDrafter",
                              "A head of a target's own file at work. See native/heads_drafter.h.")
        .def(nb::new_(&open_heads), nb::arg("model"), nb::arg("target_pass"), nb::arg("spec"),
             nb::arg("n_draft"), nb::arg("n_seq"), nb::arg("n_ctx"), nb::arg("n_threads"),
             nb::arg("threads").none() = nb::none())
        .def_prop_ro("n_builds", &heads_drafter::n_builds)
        .def("length", &heads_drafter::length, nb::arg("seq"))
        .def("inject", &inject_into_heads, nb::arg("seq"), nb::arg("tokens"), nb::arg("stored"))
        .def("draft", &draft_with_heads, nb::arg("seqs"), nb::arg("tokens"), nb::arg("stored"),
             nb::arg("anchors"), nb::arg("n_draft"),
             "ids int32 and log-probabilities float32, both [n_seqs, n_draft].")
        .def("truncate", &heads_drafter::truncate, nb::arg("seq"), nb::arg("length"))
        .def("copy", &heads_drafter::copy, nb::arg("source"), nb::arg("target"), nb::arg("length"))
        .def("save", &save<heads_drafter>, nb::arg("seq"),
             "The rows of a sequence, uint8 [n], for `restore`.")
        .def("restore", &restore<heads_drafter>, nb::arg("seq"), nb::arg("saved"));
}
