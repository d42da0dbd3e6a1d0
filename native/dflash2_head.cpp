#include "dflash2_head.h"

#include <algorithm>

#include "no_number.h"

namespace dflash {

size_t dflash2_head::n_nodes(int /*n_draft*/) const { return draft_candidates::n_nodes + 48; }

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
    const std::vector<ggml_tensor *> results = {candidates_.ids, candidates_.logits, first_,
                                                steps_};
    for (ggml_tensor * result : results) {
        if (result != nullptr) {
            ggml_set_output(result);
            ggml_build_forward_expand(parts.graph, result);
        }
    }
    results_.place(parts.backend, results);
}

void dflash2_head::read(ggml_backend_t backend, const std::vector<int32_t> & anchors,
                        const draft_rows & out) {
    results_.fetch(backend);
    check_numbers(results_.of<float>(candidates_.logits),
                  int64_t{n_draft_} * n_streams_ * n_candidates_);
    for (int s = 0; s < n_streams_; s++) {
        const size_t at = static_cast<size_t>(s) * n_draft_ * top_k_;
        follow(lattice_of(s), anchors[s], top_k_,
               {out.ids + at, out.logprobs + at,
                out.steps != nullptr ? out.steps + at * top_k_ : nullptr});
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

}  // namespace dflash
