#include "draft_cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "backend.h"
#include "errors.h"

namespace dflash {

namespace {

constexpr int cell_step = 256;  // attention kernels prefer KV lengths that are multiples of this
constexpr int smallest_cache = 1024;
// Rows before the window that are kept, so that rolling back this many rows costs no draft
// anything. They are at least as many as one draft injects, so its rows and its block never share a
// cell.
constexpr int spare_rows = 64;

// Well beyond any model, and small enough that no size computed from them overflows.
constexpr int most_rows = 1 << 28;
constexpr int most_sequences = 1 << 12;

// What `save` writes before the rows.
struct saved_rows {
    int32_t length;
    int32_t first;
};

int round_up(int n, int step) { return (n + step - 1) / step * step; }

}  // namespace

draft_cache::draft_cache(const draft_params & params, ggml_backend_dev_t device, int n_seq,
                         int n_ctx, int window)
    : k(params.n_layer),
      v(params.n_layer),
      head_dim_(params.head_dim),
      n_head_kv_(params.n_head_kv),
      block_size_(params.block_size),
      n_ctx_(n_ctx),
      window_(window),
      device_(device) {
    if (n_seq < 1 || n_seq > most_sequences) {
        throw std::invalid_argument("n_seq " + std::to_string(n_seq) + " is not in 1 .. " +
                                    std::to_string(most_sequences));
    }
    if (n_ctx < 1 || n_ctx > most_rows) {
        throw std::invalid_argument("n_ctx " + std::to_string(n_ctx) + " is not in 1 .. " +
                                    std::to_string(most_rows));
    }
    if (window < 0) {
        throw std::invalid_argument("draft_window " + std::to_string(window) +
                                    " is negative; 0 is for all rows");
    }
    if (window == 0 || window > n_ctx) {
        window_ = n_ctx;
    }
    // No more than the context needs: the ring then never wraps around.
    largest_ = round_up(std::min(window_ + spare_rows, n_ctx) + block_size_ + 1, cell_step);
    rows_.resize(n_seq);
}

size_t draft_cache::n_bytes() const {
    return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0;
}

int draft_cache::first_visible(int seq, int length) const {
    return std::max(rows_.at(seq).first, length - window_);
}

bool draft_cache::reserve(int64_t n_rows) {
    if (n_rows > n_ctx_) {
        throw context_full_error("the drafter's cache holds " + std::to_string(n_ctx_) +
                                 " rows, asked for " + std::to_string(n_rows) +
                                 "; load with a larger context");
    }
    const int needed =
        std::min(round_up(static_cast<int>(n_rows) + block_size_ + 1, cell_step), largest_);
    if (needed <= n_cells_) {
        return false;
    }
    const int wanted = std::max({needed, smallest_cache, round_up(n_cells_ * 3 / 2, cell_step)});
    const int n_cells = std::min(wanted, largest_);

    const size_t n_layer = k.size();
    ggml_context_ptr tensors = new_tensors(2 * n_layer + 2);
    const int64_t width = static_cast<int64_t>(head_dim_) * n_head_kv_;
    const int64_t rows = static_cast<int64_t>(n_cells) * n_seq();
    std::vector<ggml_tensor *> new_k(n_layer);
    std::vector<ggml_tensor *> new_v(n_layer);
    const auto all_layers = [&] {
        return ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F16, width,
                                  rows * static_cast<int64_t>(n_layer));
    };
    ggml_tensor * new_all_k = all_layers();
    ggml_tensor * new_all_v = all_layers();
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(
        tensors.get(), ggml_backend_dev_buffer_type(device_)));
    if (!buffer) {
        throw backend_error("no room on " + std::string(ggml_backend_dev_name(device_)) +
                            " to grow the drafter's cache to " + std::to_string(n_cells) +
                            " rows for each of " + std::to_string(n_seq()) +
                            " sequences; load with a smaller context");
    }
    // Not views: CUDA rotates and stores keys in one kernel only where what they are stored in is
    // no node of the graph.
    const auto layers_of = [&](ggml_tensor * all, std::vector<ggml_tensor *> & parts) {
        for (size_t i = 0; i < n_layer; i++) {
            parts[i] = ggml_new_tensor_2d(tensors.get(), GGML_TYPE_F16, width, rows);
            ggml_backend_tensor_alloc(buffer.get(), parts[i],
                                      static_cast<char *>(all->data) + i * rows * all->nb[1]);
        }
    };
    layers_of(new_all_k, new_k);
    layers_of(new_all_v, new_v);
    // A cell that was never written must be finite: a masked weight of 0 times NaN is NaN.
    ggml_backend_buffer_clear(buffer.get(), 0);
    for (size_t i = 0; i < n_layer; i++) {
        for (int seq = 0; seq < n_seq(); seq++) {
            // A ring that can grow has not wrapped around yet.
            const int64_t from = static_cast<int64_t>(seq) * n_cells_;
            const int64_t to = static_cast<int64_t>(seq) * n_cells;
            copy_cells(k[i], from, new_k[i], to, length(seq));
            copy_cells(v[i], from, new_v[i], to, length(seq));
        }
    }
    k = std::move(new_k);
    v = std::move(new_v);
    all_k = new_all_k;
    all_v = new_all_v;
    tensors_ = std::move(tensors);
    buffer_ = std::move(buffer);
    n_cells_ = n_cells;
    return true;
}

void draft_cache::copy_cells(ggml_tensor * from, int64_t from_cell, ggml_tensor * to,
                             int64_t to_cell, int n) const {
    if (n == 0) {
        return;
    }
    const ggml_context_ptr ctx = new_tensors(2);
    ggml_tensor * src = ggml_view_2d(ctx.get(), from, from->ne[0], n, from->nb[1],
                                     static_cast<size_t>(from_cell) * from->nb[1]);
    ggml_tensor * dst = ggml_view_2d(ctx.get(), to, to->ne[0], n, to->nb[1],
                                     static_cast<size_t>(to_cell) * to->nb[1]);
    ggml_backend_view_init(src);
    ggml_backend_view_init(dst);
    ggml_backend_tensor_copy(src, dst);
}

void draft_cache::set_length(int seq, int length) {
    held_rows & rows = rows_.at(seq);
    rows = {length, std::min(rows.first, length)};
}

void draft_cache::overwrite(int seq, int end) {
    held_rows & rows = rows_.at(seq);
    rows.first = std::max(rows.first, end - n_ring());
}

std::vector<int> draft_cache::lengths() const {
    std::vector<int> lengths;
    for (const held_rows & rows : rows_) {
        lengths.push_back(rows.length);
    }
    return lengths;
}

void draft_cache::set_lengths(const std::vector<int> & lengths) noexcept {
    for (size_t seq = 0; seq < lengths.size(); seq++) {
        set_length(static_cast<int>(seq), lengths[seq]);
    }
}

void draft_cache::clear() {
    rows_.assign(rows_.size(), {});
    if (buffer_) {
        ggml_backend_buffer_clear(buffer_.get(), 0);
    }
}

void draft_cache::copy(int from, int to, int length) {
    const int first = std::min(rows_.at(from).first, length);
    if (from != to) {
        for_cells(from, first, length, [&](int position, int n, int64_t from_cell) {
            for (size_t i = 0; i < k.size(); i++) {
                copy_cells(k[i], from_cell, k[i], cell(to, position), n);
                copy_cells(v[i], from_cell, v[i], cell(to, position), n);
            }
        });
    }
    rows_.at(to) = {length, first};
}

template <typename Part>
void draft_cache::for_cells(int seq, int begin, int end, const Part & part) const {
    while (begin < end) {  // up to the end of the ring, then on from its start
        const int n = std::min(end - begin, n_ring() - begin % n_ring());
        part(begin, n, cell(seq, begin));
        begin += n;
    }
}

size_t draft_cache::row_bytes() const {
    return ggml_row_size(GGML_TYPE_F16, static_cast<int64_t>(head_dim_) * n_head_kv_);
}

size_t draft_cache::n_saved_bytes(int seq) const {
    const held_rows & rows = rows_.at(seq);
    const auto n = static_cast<size_t>(rows.length - rows.first);
    return sizeof(saved_rows) + n * 2 * k.size() * row_bytes();
}

void draft_cache::save(int seq, uint8_t * out) const {
    const held_rows & rows = rows_.at(seq);
    const saved_rows head{rows.length, rows.first};
    std::memcpy(out, &head, sizeof(head));
    out += sizeof(head);
    for (size_t i = 0; i < k.size(); i++) {
        for (const ggml_tensor * cells : {k[i], v[i]}) {
            for_cells(seq, rows.first, rows.length, [&](int, int n, int64_t cell) {
                const size_t n_bytes = n * row_bytes();
                ggml_backend_tensor_get(cells, out, cell * row_bytes(), n_bytes);
                out += n_bytes;
            });
        }
    }
}

bool draft_cache::restore(int seq, const uint8_t * saved, size_t n_bytes) {
    saved_rows head;
    if (n_bytes < sizeof(head)) {
        throw std::invalid_argument("saved rows of a drafter: " + std::to_string(n_bytes) +
                                    " bytes are too few");
    }
    std::memcpy(&head, saved, sizeof(head));
    if (head.first < 0 || head.length < head.first || head.length > most_rows) {
        throw std::invalid_argument("saved rows of a drafter: positions " +
                                    std::to_string(head.first) + " to " +
                                    std::to_string(head.length) + " cannot be");
    }
    const size_t n_rows = head.length - head.first;
    if (n_bytes != sizeof(head) + n_rows * 2 * k.size() * row_bytes()) {
        throw std::invalid_argument("saved rows of a drafter: " + std::to_string(n_bytes) +
                                    " bytes are not those of " + std::to_string(n_rows) +
                                    " rows of this one");
    }
    const bool moved = reserve(head.length);
    saved += sizeof(head);
    const int begin = std::max(head.first, head.length - n_ring());
    for (size_t i = 0; i < k.size(); i++) {
        for (ggml_tensor * cells : {k[i], v[i]}) {
            for_cells(seq, begin, head.length, [&](int position, int n, int64_t cell) {
                const uint8_t * rows = saved + (position - head.first) * row_bytes();
                ggml_backend_tensor_set(cells, rows, cell * row_bytes(), n * row_bytes());
            });
            saved += n_rows * row_bytes();
        }
    }
    rows_.at(seq) = {head.length, begin};
    return moved;
}

ggml_tensor * draft_cache::view(ggml_context * ctx, ggml_tensor * cache, int n_kv,
                                int n_streams) const {
    const size_t head = head_dim_ * ggml_element_size(cache);
    return ggml_view_4d(ctx, cache, head_dim_, n_kv, n_head_kv_, n_streams, cache->nb[1], head,
                        static_cast<size_t>(n_cells_) * cache->nb[1], 0);
}

}  // namespace dflash
