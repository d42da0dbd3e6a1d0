#include <algorithm>

#include "draft_candidates.h"
#include "draft_head.h"
#include "errors.h"
#include "host_mirror.h"

namespace dflash {

namespace {

// DFlash 2: a selector scores each candidate of a position after each of the one before, by
// after[candidate] * (before[the one before] x gate), elementwise, where the gate follows from the
// position's state. The best step is taken from position to position. Probabilities are those among
// the candidates.
class dflash2_head : public draft_head {
  public:
    void build(const head_parts & parts) override;
    void read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
              const draft_rows & out) override;

  private:
    draft_lattice lattice_of(int stream) const;

    int n_draft_ = 0;
    int n_streams_ = 0;
    int top_k_ = 0;         // candidates that are read
    int n_candidates_ = 0;  // candidates of the selector
    draft_candidates candidates_;
    ggml_tensor * first_ = nullptr;  // f32 [n_candidates, 1, n_streams]: after the anchor
    ggml_tensor * steps_ = nullptr;  // f32 [n_candidates, n_candidates, later rows]; may be null
    host_mirror results_;
};

void dflash2_head::build(const head_parts & parts) {
    ggml_context * c = parts.nodes;
    const draft_params & p = parts.weights.params;
    const selector_weights & w = parts.weights.selector;
    n_draft_ = parts.n_draft;
    n_streams_ = parts.n_streams;
    top_k_ = parts.top_k;
    n_candidates_ = p.selector.top_k;
    const int64_t k = n_candidates_;
    const int64_t rank = p.selector.rank;
    const int64_t n_rows = parts.n_rows();
    const int64_t n_later = n_rows - n_streams_;
    candidates_.build(c, parts.backend, parts.scratch, scaled_logits(c, p, parts.logits),
                      n_candidates_, parts.wanted == selection::on_device);

    ggml_tensor * gate = ggml_mul_mat(c, w.gate, parts.states);
    ggml_prec_set_acc(gate, GGML_PREC_F32);
    const auto gates = [&](int64_t first, int64_t n) {
        return ggml_view_3d(c, gate, rank, 1, n, gate->nb[1], gate->nb[1], first * gate->nb[1]);
    };
    ggml_tensor * after =
        ggml_get_rows(c, w.after, ggml_reshape_1d(c, candidates_.ids, k * n_rows));
    const auto afters = [&](int64_t first, int64_t n) {
        return ggml_view_3d(c, after, rank, k, n, after->nb[1], k * after->nb[1],
                            first * k * after->nb[1]);
    };
    ggml_tensor * anchors = ggml_reshape_3d(c, parts.anchors, rank, 1, n_streams_);
    first_ = step_scores(c, afters(0, n_streams_), ggml_mul(c, anchors, gates(0, n_streams_)));
    if (n_later > 0) {
        ggml_tensor * before =
            ggml_get_rows(c, w.before, ggml_view_1d(c, candidates_.ids, k * n_later, 0));
        before = ggml_reshape_3d(c, before, rank, k, n_later);
        steps_ = step_scores(c, afters(n_streams_, n_later),
                             ggml_mul(c, before, gates(n_streams_, n_later)));
    }
    results_.place(parts.backend, parts.graph,
                   {candidates_.ids, candidates_.logits, first_, steps_});
}

void dflash2_head::read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
                        const draft_rows & out) {
    results_.fetch(backend);
    check_numbers(results_.of<float>(candidates_.logits),
                  int64_t{n_draft_} * n_streams_ * n_candidates_);
    for (int s = 0; s < n_streams_; s++) {
        follow(lattice_of(s), anchors[s], top_k_, out.of_block(s, n_draft_, top_k_));
    }
}

draft_lattice dflash2_head::lattice_of(int stream) const {
    const int k = n_candidates_;
    const auto * ids = results_.of<int32_t>(candidates_.ids);
    const auto * logits = results_.of<float>(candidates_.logits);
    draft_lattice lattice(n_draft_, k);
    for (int i = 0; i < n_draft_; i++) {
        const int row = i * n_streams_ + stream;
        std::copy_n(ids + row * k, k, lattice.ids.data() + i * k);
        const float * steps =
            i == 0 ? results_.of<float>(first_) + stream * k
                   : results_.of<float>(steps_) + static_cast<size_t>(row - n_streams_) * k * k;
        for (int a = 0; a < k; a++) {
            for (int b = 0; b < k; b++) {
                lattice.score(i, a, b) = logits[row * k + b] + steps[i == 0 ? b : a * k + b];
            }
        }
    }
    return lattice;
}

}  // namespace

std::unique_ptr<draft_head> make_dflash2_head() { return std::make_unique<dflash2_head>(); }

}  // namespace dflash
