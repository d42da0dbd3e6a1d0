#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// Finds the largest logits of rows on the device that has computed them, so that only a few
// kilobytes come to the host. It has a small graph of its own, which runs when it is asked for:
// passes whose rows are not sampled pay nothing.
class candidate_search {
  public:
    // Searches rows `first` .. `first + n` - 1 of logits, f32 [n_vocab, rows], which must be there,
    // for their k largest. With a temperature it sums up chunks, too. False if the device cannot do
    // it; then nothing is found.
    bool find(const ggml_tensor & logits, int64_t first, int64_t n, int k, float temperature = 0);

    // Whether the sums of a row have the same bits whatever was asked of others, and of how many.
    // Set it before the first search. A search for more candidates then does not serve: its chunks
    // may be shorter.
    bool sums_alike = false;

    // Whether row `row` has been searched for k candidates since `forget`, or for any number if k
    // is 0, and summed up at this temperature.
    bool has(int64_t row, int k, float temperature = 0) const {
        return row >= first_ && row < first_ + n_ &&
               (k == k_ || (!sums_alike && k < k_) || k == 0) &&
               (temperature == 0 || temperature == temperature_);
    }

    // The logits have changed.
    void forget() { n_ = 0; }

    // The k largest of a row that has been searched: largest first, equal ones by id. If not all
    // equal ones fit, any of them. False if the largest is not finite or a NaN is in the row.
    bool read(int64_t row, int k, int32_t * ids, float * logits) const;

    // log(sum(exp(x))) over the whole of a row that has been searched.
    double log_sum(int64_t row) const;

    // sum(exp((x - peak) / T)) of each of the chunks of a row that has been summed up.
    const float * chunk_sums(int64_t row) const;
    int64_t chunk_size() const { return chunk_size_; }

  private:
    // Where the logits are, how many rows, how many candidates, and the temperature. The buffer,
    // too: llama.cpp may free one and get another at the same address, and a graph refers to its
    // own.
    using shape = std::tuple<const void *, const void *, int64_t, int, float>;
    // What comes to the host, in this order.
    enum part { few, places, values, sums, sums_of_chunks, n_parts };
    struct search_graph {
        ggml_context_ptr nodes;
        ggml_cgraph * graph = nullptr;
        int64_t chunk_size = 0;
        ggml_tensor * results[n_parts] = {};
    };

    bool open(ggml_backend_dev_t device);
    const search_graph * graph(const ggml_tensor & logits, int64_t first, int64_t n, int k,
                               float temperature);
    std::optional<search_graph> build(const ggml_tensor & logits, int64_t first, int64_t n, int k,
                                      float temperature) const;
    bool fetch(const search_graph & graph);
    template <typename T>
    const T * fetched(part which, int64_t row) const;

    ggml_backend_ptr backend_;
    ggml_gallocr_ptr allocator_;  // of all graphs, as only one runs at a time
    std::map<shape, search_graph> graphs_;

    ggml_backend_buffer_ptr host_;  // memory that the device writes to
    size_t offsets_[n_parts] = {};
    size_t row_bytes_[n_parts] = {};
    int64_t first_ = 0;
    int64_t n_ = 0;
    int k_ = 0;
    float temperature_ = 0;
    int64_t chunk_size_ = 0;
};

}  // namespace dflash
