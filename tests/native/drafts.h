#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fused_drafter.h"
#include "shipped_pair.h"

// What a drafter puts out: [n_requests, n_draft, top_k].
struct drafts {
    int top_k = 0;
    std::vector<int32_t> ids;
    std::vector<float> logprobs;

    bool operator==(const drafts & o) const { return ids == o.ids && logprobs == o.logprobs; }

    // Those of one request of several.
    drafts of(int request, int n_requests) const {
        const size_t n = ids.size() / n_requests;
        const auto from = static_cast<std::ptrdiff_t>(n * request);
        const auto to = static_cast<std::ptrdiff_t>(n * (request + 1));
        return {top_k,
                {ids.begin() + from, ids.begin() + to},
                {logprobs.begin() + from, logprobs.begin() + to}};
    }
};

inline drafts draft(dflash::fused_drafter & d, const std::vector<dflash::draft_request> & requests,
                    int n_draft) {
    const size_t n = requests.size() * n_draft * d.top_k();
    drafts out{d.top_k(), std::vector<int32_t>(n), std::vector<float>(n)};
    d.draft(requests, n_draft, out.ids.data(), out.logprobs.data());
    return out;
}

// Draws a whole block after `n` more rows of the prompt, from its row `first` on.
inline drafts draft_after(const shipped_pair & pair, dflash::fused_drafter & d, int seq, int n,
                          int first) {
    const std::vector<float> rows = pair.features(n, first);
    const int32_t anchor = pair.prompt()[(first + n) % pair.prompt().size()];
    return draft(d, {{seq, {n, rows.data()}, anchor}}, d.params().block_size - 1);
}

inline void inject(const shipped_pair & pair, dflash::fused_drafter & d, int seq, int n,
                   int first = 0) {
    const std::vector<float> rows = pair.features(n, first);
    d.inject(seq, {n, rows.data()});
}
