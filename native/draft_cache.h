#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft_params.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace dflash {

// K and V of injected rows, f16, per drafter layer: [n_embd_kv, n_cells * n_seq]. A sequence owns
// n_cells adjacent cells. They form a ring, except for the last one, which takes the rows that only
// fill up a bucket. The row at position p is in cell p of the ring, modulo its size, so rolling
// back only changes a length. Cells beyond the length are scratch: the block's own K and V are
// there during a draft.
//
// Without a window the ring is as long as the context and never wraps around. With one it holds the
// window, a block, and a few more rows to roll back to. Older rows are overwritten.
class draft_cache {
  public:
    // No memory is taken until `reserve`. n_ctx: the most rows that a sequence may have. window:
    // how many of its last rows drafts look at; 0: all.
    // Throws std::invalid_argument for numbers out of range.
    draft_cache(const draft_params & params, ggml_backend_dev_t device, int n_seq, int n_ctx,
                int window);

    int n_seq() const { return static_cast<int>(rows_.size()); }
    int n_cells() const { return n_cells_; }
    int n_ring() const { return n_cells_ - 1; }
    int length(int seq) const { return rows_.at(seq).length; }
    size_t n_bytes() const;

    // The first position that a draft after `length` rows may look at: within the window, and not
    // overwritten.
    int first_visible(int seq, int length) const;

    // Makes room for n_rows per sequence, or for the window if that is less, and a block after
    // them. True if the tensors moved, so that graphs over them are invalid. Throws
    // context_full_error or backend_error, with nothing changed.
    bool reserve(int64_t n_rows);

    void set_length(int seq, int length);

    // Call this before cells of positions up to `end` are written, scratch included. The rows that
    // were in them are gone, even if the new ones are dropped.
    void overwrite(int seq, int end);

    // Forgets all rows, and what they were.
    void clear();

    // The lengths of all sequences.
    std::vector<int> lengths() const;
    void set_lengths(const std::vector<int> & lengths) noexcept;

    // Makes the first `length` rows of one sequence those of another.
    void copy(int from, int to, int length);

    // The rows of a sequence that are still there, as bytes in host memory: their count and the
    // position of the first one, then K and V per layer. `restore` works in a cache of any size.
    size_t n_saved_bytes(int seq) const;
    void save(int seq, uint8_t * out) const;

    // Replaces the rows of a sequence by saved ones. If there are too few cells, it takes the last
    // rows. Throws std::invalid_argument, with nothing changed, for bytes that `save` did not write
    // for a drafter of this shape, and what `reserve` throws. True if the tensors moved.
    bool restore(int seq, const uint8_t * saved, size_t n_bytes);

    // [head_dim, n_kv, n_head_kv, n_streams], cells 0 .. n_kv-1 of the first sequences
    ggml_tensor * view(ggml_context * ctx, ggml_tensor * cache, int n_kv, int n_streams) const;

    int64_t cell(int seq, int position) const {
        return static_cast<int64_t>(seq) * n_cells_ + position % n_ring();
    }
    int64_t spare_cell() const { return n_cells_ - 1; }

    // The number that a layer's cell has in the tensors of all layers.
    int64_t cell_of_all(int layer, int64_t cell) const {
        return static_cast<int64_t>(layer) * n_cells_ * n_seq() + cell;
    }

    std::vector<ggml_tensor *> k;  // per layer, in the memory of the next two
    std::vector<ggml_tensor *> v;
    ggml_tensor * all_k = nullptr;  // [n_embd_kv, n_cells * n_seq * n_layer]
    ggml_tensor * all_v = nullptr;

  private:
    struct held_rows {
        int length = 0;  // rows that were injected: positions 0 .. length-1
        int first = 0;   // rows from here on are still there
    };

    // Calls part(position, n, cell) for rows begin .. end-1 of a sequence, once per stretch of
    // adjacent cells.
    template <typename Part>
    void for_cells(int seq, int begin, int end, const Part & part) const;

    size_t row_bytes() const;  // K or V of one row in one layer
    void copy_cells(ggml_tensor * from, int64_t from_cell, ggml_tensor * to, int64_t to_cell,
                    int n) const;

    int head_dim_;
    int n_head_kv_;
    int block_size_;
    int n_ctx_;
    int window_;
    int largest_ = 0;  // cells per sequence, at most
    int n_cells_ = 0;
    ggml_backend_dev_t device_;
    ggml_context_ptr tensors_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<held_rows> rows_;
};

}  // namespace dflash
