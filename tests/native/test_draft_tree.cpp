// Trees of random candidates, damaged ones too, and drafts that copies join.

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <utility>

#include "check.h"
#include "draft_chances.h"
#include "draft_tree.h"
#include "joined_draft.h"

namespace {

using dflash::copied_text;
using dflash::draft_tree;

std::mt19937 source(4);

int up_to(int n) { return std::uniform_int_distribution<int>(0, n)(source); }

// Falling, as a drafter gives them, but for one in twenty.
std::vector<float> logprobs(int n, int k) {
    const float odd[] = {std::numeric_limits<float>::quiet_NaN(),
                         -std::numeric_limits<float>::infinity(), 0.5f, -1e9f};
    std::vector<float> found(n * k);
    for (int i = 0; i < n * k; i++) {
        const float before = i % k == 0 ? 0.0f : found[i - 1];
        found[i] = up_to(19) == 0 ? odd[up_to(3)] : before - 0.1f * up_to(30);
    }
    return found;
}

void is_tree(const draft_tree & tree, int n_nodes) {
    check::that(static_cast<int>(tree.tokens.size()) <= n_nodes, "at most so many nodes");
    std::set<std::pair<int32_t, int32_t>> edges;
    for (size_t i = 0; i < tree.tokens.size(); i++) {
        check::that(tree.parents[i] >= -1 && tree.parents[i] < static_cast<int>(i),
                    "a parent before its child");
        check::that(edges.insert({tree.parents[i], tree.tokens[i]}).second, "no equal siblings");
    }
}

void random_trees() {
    for (int round = 0; round < 2000; round++) {
        const int n = 1 + up_to(6), k = 1 + up_to(5), n_nodes = up_to(40);
        std::vector<int32_t> ids(n * k);
        std::generate(ids.begin(), ids.end(), [] { return up_to(12) - 1; });
        std::vector<float> rows = logprobs(n, k), steps;
        if (round % 2 == 0) {
            steps = logprobs(n * k, k);
        }
        std::vector<double> chances(n);
        std::generate(chances.begin(), chances.end(), [] { return up_to(100) / 100.0; });
        if (round % 3 == 0) {
            dflash::rate_candidates(rows.data(), steps.empty() ? nullptr : steps.data(), chances,
                                    k);
            for (const float logprob : rows) {
                check::that(std::isfinite(logprob) && logprob <= 0.0f, "a chance");
            }
        }
        const draft_tree tree =
            dflash::grow_tree(ids.data(), rows.data(), steps.empty() ? nullptr : steps.data(), n, k,
                              10, {n_nodes, 1 + up_to(8), up_to(8)}, (1 + up_to(9)) / 10.0);
        is_tree(tree, n_nodes);
    }
}

void random_joins() {
    for (int round = 0; round < 2000; round++) {
        const int n = up_to(12), n_nodes = 1 + up_to(40), n_leaves = 1 + up_to(6);
        std::vector<int32_t> tokens(n), parents(n);
        std::vector<double> chances;
        for (int i = 0; i < n; i++) {
            tokens[i] = up_to(3);
            parents[i] = up_to(i) - 1;
            if (i < n - 1 || round % 4) {
                chances.push_back((parents[i] < 0 ? 1.0 : chances[parents[i]]) * up_to(10) / 10.0);
            }
        }
        std::vector<copied_text> copies(up_to(3));
        for (copied_text & copy : copies) {
            copy.tokens.resize(1 + up_to(60));
            copy.chances.resize(copy.tokens.size());
            std::generate(copy.tokens.begin(), copy.tokens.end(), [] { return up_to(3); });
            std::generate(copy.chances.begin(), copy.chances.end(),
                          [] { return up_to(10) / 10.0; });
        }
        const dflash::joined_draft draft =
            dflash::join_copies(tokens, parents, chances, copies, n_nodes, n_leaves);
        is_tree(draft, n_nodes);
        check::that(std::is_sorted(draft.chances.rbegin(), draft.chances.rend()),
                    "falling chances");
        check::that(draft.chances.size() == draft.tokens.size() &&
                        draft.copied.size() == draft.tokens.size(),
                    "one of each for a node");
    }
}

void chances_follow_outcomes() {
    dflash::draft_chances known({-0.3, 1.1, 0.5, 0.0, 0.12}, 0.0015, 0.5);
    const std::vector<double> told = {-0.1, -0.1, std::numeric_limits<double>::quiet_NaN(), 0.0};
    const double before = known.each(told)[0];
    for (int i = 0; i < 200; i++) {
        known.learn({-0.1, -0.1}, i % 10 == 0 ? 1 : 0);
    }
    for (const double chance : known.each(told)) {
        check::that(chance > 0.0 && chance < 1.0, "a chance");
    }
    check::that(known.each(told)[0] < before / 2, "drafts that are seldom right");
    check::that(known.each({}).empty(), "none of none");
}

const check::tests registered{
    {"trees of random candidates", random_trees},
    {"drafts joined with random copies", random_joins},
    {"chances that follow outcomes", chances_follow_outcomes},
};

}  // namespace
