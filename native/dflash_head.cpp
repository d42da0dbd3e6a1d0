#include "dflash_head.h"

namespace dflash {

size_t dflash_head::n_nodes(int /*n_draft*/) const { return draft_output::n_nodes + 8; }

void dflash_head::build(const head_parts & parts) {
    n_streams_ = parts.n_streams;
    output_.build(parts.nodes, parts.graph, parts.backend, parts.scratch,
                  scaled_logits(parts.nodes, parts.weights.params, parts.logits), parts.top_k,
                  parts.wanted);
}

void dflash_head::read(ggml_backend_t backend, const std::vector<int32_t> & /*anchors*/,
                       const draft_rows & out) {
    output_.read(backend, n_streams_, out.ids, out.logprobs);
}

}  // namespace dflash
