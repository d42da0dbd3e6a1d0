#include "draft_tree.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <queue>
#include <tuple>
#include <utility>

namespace dflash {

namespace {

struct candidate {
    float logprob;
    int32_t token;
    int place;  // among all of its position
};

// The candidates of a position that can be drafted, best first. in_order: so they are given.
std::vector<candidate> usable(const int32_t * ids, const float * logprobs, int k, int n_vocab,
                              bool in_order) {
    std::vector<candidate> found;
    float most = 0.0f;
    for (int i = 0; i < k; i++) {
        const bool is_known = std::any_of(found.begin(), found.end(),
                                          [&](const candidate & c) { return c.token == ids[i]; });
        // A token whose log-probability is not a number is left out.
        if (ids[i] >= 0 && ids[i] < n_vocab && !is_known && logprobs[i] > -INFINITY) {
            found.push_back({std::min(most, logprobs[i]), ids[i], i});
            most = in_order ? found.back().logprob : most;  // never above the one before
        }
    }
    if (!in_order) {
        std::stable_sort(found.begin(), found.end(), [](const candidate & a, const candidate & b) {
            return a.logprob > b.logprob;
        });
    }
    return found;
}

// A node that may come next.
struct offer {
    double cost;  // minus the log-probability of its path
    int level;
    int parent;
    int rank;
    double before;  // the cost of its parent
    int after;      // the place of its parent, if that counts

    bool operator>(const offer & o) const {
        return std::tie(cost, level, parent, rank) > std::tie(o.cost, o.level, o.parent, o.rank);
    }
};

}  // namespace

draft_tree grow_tree(const int32_t * ids, const float * logprobs, const float * steps,
                     int n_positions, int k, int n_vocab, const tree_bounds & bounds) {
    const int depth = std::min(n_positions, bounds.n_depth);
    // By level and the place of the parent; filled as far as the tree has grown.
    std::map<std::pair<int, int>, std::vector<candidate>> rows;
    const auto row_of = [&](int level, int after) -> const std::vector<candidate> & {
        const auto [it, is_new] = rows.try_emplace({level, after});
        if (is_new) {
            const float * of_level =
                steps != nullptr ? steps + (level * k + after) * k : logprobs + level * k;
            it->second = usable(ids + level * k, of_level, k, n_vocab, steps == nullptr);
        }
        return it->second;
    };
    std::priority_queue<offer, std::vector<offer>, std::greater<>> waiting;
    const auto add = [&](int level, int parent, int rank, double before, int after) {
        if (level >= depth) {
            return;
        }
        const std::vector<candidate> & row = row_of(level, after);
        if (rank < static_cast<int>(row.size())) {
            waiting.push({before - row[rank].logprob, level, parent, rank, before, after});
        }
    };
    draft_tree tree;
    int n_leaves = 0;
    if (bounds.n_leaves > 0) {
        add(0, -1, 0, 0.0, 0);
    }
    while (!waiting.empty() && static_cast<int>(tree.tokens.size()) < bounds.n_nodes) {
        const offer next = waiting.top();
        waiting.pop();
        if (next.rank > 0) {  // its parent has a child already
            if (n_leaves == bounds.n_leaves) {
                continue;
            }
            n_leaves++;
        } else if (next.parent < 0) {
            n_leaves = 1;
        }
        const auto node = static_cast<int>(tree.tokens.size());
        const candidate & chosen = row_of(next.level, next.after)[next.rank];
        tree.tokens.push_back(chosen.token);
        tree.parents.push_back(next.parent);
        tree.logprobs.push_back(chosen.logprob);
        add(next.level, next.parent, next.rank + 1, next.before, next.after);
        add(next.level + 1, node, 0, next.cost, steps != nullptr ? chosen.place : 0);
    }
    return tree;
}

}  // namespace dflash
