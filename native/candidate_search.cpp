#include "candidate_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "backend.h"
#include "chunks.h"
#include "errors.h"

namespace dflash {

namespace {

constexpr size_t n_nodes = 40;
constexpr size_t most_graphs = 16;
constexpr size_t alignment = 128;

}  // namespace

bool candidate_search::open(ggml_backend_dev_t device) {
    if (backend_ && ggml_backend_get_device(backend_.get()) == device) {
        return true;
    }
    graphs_.clear();
    allocator_.reset();
    host_.reset();
    try {
        backend_ = open_backend(device, /*n_threads=*/1);  // the CPU searches in tests only
    } catch (const backend_error &) {
        return false;
    }
    allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_.get())));
    return true;
}

std::optional<candidate_search::search_graph> candidate_search::build(const ggml_tensor & logits,
                                                                      int64_t first, int64_t n,
                                                                      int k,
                                                                      float temperature) const {
    search_graph built;
    built.nodes = new_nodes(n_nodes);
    ggml_context * c = built.nodes.get();
    // The same memory, but without what llama.cpp computes it from.
    ggml_tensor * rows = ggml_new_tensor_2d(c, GGML_TYPE_F32, logits.ne[0], n);
    rows->buffer = logits.buffer;
    rows->data = static_cast<char *>(logits.data) + first * logits.nb[1];
    const auto chunks = find_chunks(c, backend_.get(), rows, k, sums_alike);
    const auto best = chunks ? find_best(c, backend_.get(), *chunks) : std::nullopt;
    if (!best) {
        return std::nullopt;
    }
    built.results[few] = chunks->few;
    built.results[places] = best->places;
    built.results[values] = best->values;
    built.results[sums] = chunks->exps.sums;
    if (temperature > 0) {
        built.results[sums_of_chunks] =
            tempered_sums(c, backend_.get(), *chunks, temperature, sums_alike);
        if (built.results[sums_of_chunks] == nullptr) {
            return std::nullopt;
        }
    }
    built.chunk_size = chunks->size;
    built.graph = ggml_new_graph_custom(c, n_nodes, false);
    for (ggml_tensor * result : built.results) {
        if (result != nullptr) {
            ggml_set_output(result);
            ggml_build_forward_expand(built.graph, result);
        }
    }
    return built;
}

const candidate_search::search_graph * candidate_search::graph(const ggml_tensor & logits,
                                                               int64_t first, int64_t n, int k,
                                                               float temperature) {
    const shape wanted{logits.buffer, static_cast<const char *>(logits.data) + first * logits.nb[1],
                       n, k, temperature};
    const auto known = graphs_.find(wanted);
    if (known != graphs_.end()) {
        return &known->second;
    }
    if (graphs_.size() >= most_graphs) {
        graphs_.clear();
    }
    auto built = build(logits, first, n, k, temperature);
    if (!built) {
        return nullptr;
    }
    if (!allocate(allocator_.get(), built->graph, graphs_)) {
        return nullptr;
    }
    return &graphs_.emplace(wanted, std::move(*built)).first->second;
}

bool candidate_search::find(const ggml_tensor & logits, int64_t first, int64_t n, int k,
                            float temperature) {
    forget();
    if (!open(device_of(logits.buffer))) {
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
        if (const ggml_tensor * result = graph.results[i]) {
            offsets_[i] = n_bytes;
            row_bytes_[i] = ggml_nbytes(result) / ggml_nrows(graph.results[sums]);
            n_bytes += GGML_PAD(ggml_nbytes(result), alignment);
        }
    }
    if (!host_ || ggml_backend_buffer_get_size(host_.get()) < n_bytes) {
        host_.reset();
        host_.reset(ggml_backend_buft_alloc_buffer(
            host_buffer_type(ggml_backend_get_device(backend)), n_bytes));
        if (!host_) {
            return false;
        }
    }
    start_graph(backend, graph.graph, "on the search for candidates");
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
const T * candidate_search::fetched(part which, int64_t row) const {
    const auto * base = static_cast<const char *>(ggml_backend_buffer_get_base(host_.get()));
    return reinterpret_cast<const T *>(base + offsets_[which] + (row - first_) * row_bytes_[which]);
}

bool candidate_search::read(int64_t row, int k, int32_t * ids, float * logits) const {
    const auto * found = fetched<float>(values, row);
    if (!std::isfinite(found[0]) || !std::isfinite(*fetched<float>(sums, row))) {
        return false;
    }
    read_ids(fetched<int32_t>(few, row), fetched<int32_t>(places, row), found, chunk_size_, k, ids);
    std::copy_n(found, k, logits);
    return true;
}

double candidate_search::log_sum(int64_t row) const {
    return *fetched<float>(values, row) + std::log(double{*fetched<float>(sums, row)});
}

const float * candidate_search::chunk_sums(int64_t row) const {
    return fetched<float>(sums_of_chunks, row);
}

}  // namespace dflash
