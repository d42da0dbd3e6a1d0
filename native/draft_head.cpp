#include "draft_head.h"

#include <algorithm>
#include <cmath>

namespace dflash {

namespace {

// DFlash: positions do not depend on one another.
class dflash_head : public draft_head {
  public:
    void build(const head_parts & parts) override {
        n_streams_ = parts.n_streams;
        output_.build(parts.nodes, parts.graph, parts.backend, parts.scratch,
                      scaled_logits(parts.nodes, parts.weights.params, parts.logits), parts.top_k,
                      parts.wanted);
    }

    void read(ggml_backend_t backend, const std::vector<int32_t> & /*anchors*/,
              const draft_rows & out) override {
        output_.read(backend, n_streams_, out.ids, out.logprobs);
    }

  private:
    draft_output output_;
    int n_streams_ = 0;
};

}  // namespace

std::unique_ptr<draft_head> make_head(const draft_params & params) {
    if (params.markov_rank > 0) {
        return make_dspark_head();
    }
    if (params.selector.rank > 0) {
        return make_dflash2_head();
    }
    return std::make_unique<dflash_head>();
}

int head_top_k(const draft_params & params, int top_k) {
    return params.selector.rank > 0 ? std::min(top_k, params.selector.top_k) : top_k;
}

ggml_tensor * scaled_logits(ggml_context * c, const draft_params & params, ggml_tensor * logits) {
    if (params.logit_scale != 0.0f) {
        logits = ggml_scale(c, logits, params.logit_scale);
    }
    if (params.logit_cap != 0.0f) {
        logits = ggml_tanh(c, ggml_scale(c, logits, 1.0f / params.logit_cap));
        logits = ggml_scale(c, logits, params.logit_cap);
    }
    return logits;
}

float scaled_logit(const draft_params & params, float logit) {
    if (params.logit_scale != 0.0f) {
        logit *= params.logit_scale;
    }
    return params.logit_cap != 0.0f ? std::tanh(logit / params.logit_cap) * params.logit_cap
                                    : logit;
}

ggml_tensor * step_scores(ggml_context * c, ggml_tensor * after, ggml_tensor * before) {
    ggml_tensor * scores = ggml_mul_mat(c, after, before);
    ggml_prec_set_acc(scores, GGML_PREC_F32);
    return scores;
}

}  // namespace dflash
