#include "candidate_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include "chunks.h"
#include "draft_backend.h"
#include "errors.h"
#include "host_buffer.h"

namespace dflash {

namespace {

constexpr size_t n_nodes = 40;
constexpr size_t most_graphs = 16;
constexpr size_t alignment = 128;

// What comes to the host, in this order.
enum part { few, places, values, sums, sums_of_chunks };

}  // namespace

struct candidate_search::search_graph {
    ggml_context_ptr nodes;
    ggml_cgraph * graph = nullptr;
    int64_t chunk_size = 0;
    std::array<ggml_tensor *, n_parts> results{};
};

void candidate_search::deleter::operator()(search_graph * graph) const { delete graph; }

bool candidate_search::open(ggml_backend_dev_t device) {
    if (device == nullptr) {  // host memory belongs to none
        device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    }
    if (backend_ && ggml_backend_get_device(backend_.get()) == device) {
        return true;
    }
    graphs_.clear();
    allocator_.reset();
    host_.reset();
    try {
        backend_ = open_draft_backend(device, /*n_threads=*/1);  // the CPU searches in tests only
    } catch (const backend_error &) {
        return false;
    }
    allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_.get())));
    return true;
}

candidate_search::graph_ptr candidate_search::build(const ggml_tensor & logits, int64_t first,
                                                    int64_t n, int k, float temperature) const {
    graph_ptr built(new search_graph);
    built->nodes.reset(
        ggml_init({ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false),
                   nullptr, /*no_alloc=*/true}));
    ggml_context * c = built->nodes.get();
    // The same memory, but without what llama.cpp computes it from.
    ggml_tensor * rows = ggml_new_tensor_2d(c, GGML_TYPE_F32, logits.ne[0], n);
    rows->buffer = logits.buffer;
    rows->data = static_cast<char *>(logits.data) + first * logits.nb[1];
    const auto chunks = find_chunks(c, backend_.get(), rows, k);
    const auto best = chunks ? find_best(c, backend_.get(), *chunks) : std::nullopt;
    if (!best) {
        return nullptr;
    }
    ggml_tensor * tempered = nullptr;
    if (temperature > 0) {
        tempered = tempered_sums(c, backend_.get(), *chunks, temperature);
        if (tempered == nullptr) {
            return nullptr;
        }
    }
    built->chunk_size = chunks->size;
    built->results = {chunks->few, best->places, best->values, chunks->exps.sums, tempered};
    built->graph = ggml_new_graph_custom(c, n_nodes, false);
    for (ggml_tensor * result : built->results) {
        if (result != nullptr) {
            ggml_set_output(result);
            ggml_build_forward_expand(built->graph, result);
        }
    }
    return built;
}

candidate_search::search_graph * candidate_search::graph(const ggml_tensor & logits, int64_t first,
                                                         int64_t n, int k, float temperature) {
    const shape wanted{static_cast<const char *>(logits.data) + first * logits.nb[1], n, k,
                       temperature};
    const auto known = graphs_.find(wanted);
    if (known != graphs_.end()) {
        return known->second.get();
    }
    if (graphs_.size() >= most_graphs) {
        graphs_.clear();
    }
    auto built = build(logits, first, n, k, temperature);
    if (!built) {
        return nullptr;
    }
    const size_t room = ggml_gallocr_get_buffer_size(allocator_.get(), 0);
    if (!ggml_gallocr_alloc_graph(allocator_.get(), built->graph)) {
        graphs_.clear();
        return nullptr;
    }
    if (ggml_gallocr_get_buffer_size(allocator_.get(), 0) != room) {
        graphs_.clear();  // their memory is gone
    }
    return graphs_.emplace(wanted, std::move(built)).first->second.get();
}

bool candidate_search::find(const ggml_tensor & logits, int64_t first, int64_t n, int k,
                            float temperature) {
    forget();
    ggml_backend_buffer_type_t type = ggml_backend_buffer_get_type(logits.buffer);
    if (!open(ggml_backend_buft_get_device(type))) {
        return false;
    }
    const search_graph * wanted = graph(logits, first, n, k, temperature);
    if (wanted == nullptr || !fetch(*wanted)) {
        return false;
    }
    first_ = first;
    n_ = n;
    k_ = k;
    temperature_ = temperature;
    chunk_size_ = wanted->chunk_size;
    return true;
}

// Computes a graph and copies its results to the host.
bool candidate_search::fetch(const search_graph & graph) {
    ggml_backend_t backend = backend_.get();
    size_t n_bytes = 0;
    for (int i = 0; i < n_parts; i++) {
        const ggml_tensor * result = graph.results[i];
        if (result == nullptr) {
            continue;
        }
        offsets_[i] = n_bytes;
        row_bytes_[i] = ggml_nbytes(result) / ggml_nrows(graph.results[sums]);
        n_bytes += (ggml_nbytes(result) + alignment - 1) / alignment * alignment;
    }
    if (!host_ || ggml_backend_buffer_get_size(host_.get()) < n_bytes) {
        host_.reset();
        host_.reset(ggml_backend_buft_alloc_buffer(
            host_buffer_type(ggml_backend_get_device(backend)), n_bytes));
        if (!host_) {
            return false;
        }
    }
    const ggml_status status = ggml_backend_graph_compute_async(backend, graph.graph);
    if (status != GGML_STATUS_SUCCESS) {
        throw backend_error(
            std::string(ggml_backend_name(backend)) +
            " failed on the search for candidates: " + ggml_status_to_string(status));
    }
    auto * base = static_cast<char *>(ggml_backend_buffer_get_base(host_.get()));
    for (int i = 0; i < n_parts; i++) {
        if (const ggml_tensor * result = graph.results[i]) {
            ggml_backend_tensor_get_async(backend, result, base + offsets_[i], 0,
                                          ggml_nbytes(result));
        }
    }
    ggml_backend_synchronize(backend);
    return true;
}

template <typename T>
const T * candidate_search::fetched(int part, int64_t row) const {
    const auto * base = static_cast<const char *>(ggml_backend_buffer_get_base(host_.get()));
    return reinterpret_cast<const T *>(base + offsets_[part] + (row - first_) * row_bytes_[part]);
}

bool candidate_search::read(int64_t row, int k, int32_t * ids, float * logits) const {
    const auto * chunks = fetched<int32_t>(few, row);
    const auto * best = fetched<int32_t>(places, row);
    const auto * found = fetched<float>(values, row);
    if (!std::isfinite(found[0]) || !std::isfinite(*fetched<float>(sums, row))) {
        return false;
    }
    const auto size = static_cast<int>(chunk_size_);
    for (int i = 0; i < k; i++) {
        ids[i] = chunks[best[i] / size] * size + best[i] % size;
        logits[i] = found[i];
    }
    for (int begin = 0, end = 1; begin < k; begin = end++) {
        while (end < k && logits[end] == logits[begin]) {
            end++;
        }
        std::sort(ids + begin, ids + end);
    }
    return true;
}

double candidate_search::log_sum(int64_t row) const {
    return *fetched<float>(values, row) + std::log(double{*fetched<float>(sums, row)});
}

const float * candidate_search::chunk_sums(int64_t row) const {
    return fetched<float>(sums_of_chunks, row);
}

}  // namespace dflash
