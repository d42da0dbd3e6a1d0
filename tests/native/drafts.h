#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "check.h"
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
    d.begin(requests, n_draft);
    const dflash::drafts found = d.read();
    return {d.top_k(), found.ids, found.logprobs};
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

// How far apart, in nats, log-probabilities may lie: products of 8 bits magnify the last bit of a
// sum in another order.
constexpr float q8_noise = 0.05f;

// The same candidates with the same log-probabilities, but for those too close to tell apart.
inline void check_close(const drafts & a, const drafts & b, float noise, const std::string & what) {
    check::equal(a.ids.size(), b.ids.size(), what + ": number of drafts");
    for (size_t start = 0; start < a.ids.size(); start += a.top_k) {
        for (size_t i = start; i < start + a.top_k; i++) {
            const float difference = std::abs(a.logprobs[i] - b.logprobs[i]);
            check::that(difference <= noise,
                        what + ": log-probabilities " + std::to_string(difference) + " apart");
            const auto end = b.ids.begin() + static_cast<std::ptrdiff_t>(start + a.top_k);
            const auto same =
                std::find(b.ids.begin() + static_cast<std::ptrdiff_t>(start), end, a.ids[i]);
            const float last = b.logprobs[start + a.top_k - 1];
            check::that(same != end || a.logprobs[i] <= last + 2 * noise,
                        what + ": candidate " + std::to_string(a.ids[i]) + " is missing");
        }
    }
}

inline void check_candidates(const drafts & d, int n_vocab) {
    for (size_t start = 0; start < d.ids.size(); start += d.top_k) {
        std::set<int32_t> ids;
        double mass = 0.0;
        for (size_t i = start; i < start + d.top_k; i++) {
            check::that(d.ids[i] >= 0 && d.ids[i] < n_vocab, "an id is no token");
            check::that(ids.insert(d.ids[i]).second, "a candidate is given twice");
            check::that(i == start || d.logprobs[i] <= d.logprobs[i - 1], "not best first");
            mass += std::exp(d.logprobs[i]);
        }
        check::that(mass > 0.0 && mass < 1.0 + 1e-3, "probabilities sum to more than 1");
    }
}
