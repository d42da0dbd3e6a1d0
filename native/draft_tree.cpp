#include "draft_tree.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <tuple>

namespace dflash {

namespace {

struct candidate {
    float logprob;
    int32_t token;
};

// The candidates of a position that can be drafted, best first.
std::vector<candidate> usable(const int32_t * ids, const float * logprobs, int k, int n_vocab) {
    std::vector<candidate> found;
    float least = 0.0f;
    for (int i = 0; i < k; i++) {
        const bool is_known = std::any_of(found.begin(), found.end(),
                                          [&](const candidate & c) { return c.token == ids[i]; });
        // A token whose log-probability is not a number is left out.
        if (ids[i] >= 0 && ids[i] < n_vocab && !is_known && logprobs[i] > -INFINITY) {
            least = std::min(least, logprobs[i]);  // never above the one before
            found.push_back({least, ids[i]});
        }
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

    bool operator>(const offer & o) const {
        return std::tie(cost, level, parent, rank) > std::tie(o.cost, o.level, o.parent, o.rank);
    }
};

}  // namespace

draft_tree grow_tree(const int32_t * ids, const float * logprobs, int n_positions, int k,
                     int n_vocab, const tree_bounds & bounds) {
    const int depth = std::min(n_positions, bounds.n_depth);
    std::vector<std::vector<candidate>> levels;  // filled as deep as the tree has grown
    std::priority_queue<offer, std::vector<offer>, std::greater<>> waiting;
    const auto add = [&](int level, int parent, int rank, double before) {
        if (level >= depth) {
            return;
        }
        if (level == static_cast<int>(levels.size())) {
            levels.push_back(usable(ids + level * k, logprobs + level * k, k, n_vocab));
        }
        if (rank < static_cast<int>(levels[level].size())) {
            waiting.push({before - levels[level][rank].logprob, level, parent, rank, before});
        }
    };
    draft_tree tree;
    int n_leaves = 0;
    if (bounds.n_leaves > 0) {
        add(0, -1, 0, 0.0);
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
        const candidate & chosen = levels[next.level][next.rank];
        tree.tokens.push_back(chosen.token);
        tree.parents.push_back(next.parent);
        tree.logprobs.push_back(chosen.logprob);
        add(next.level, next.parent, next.rank + 1, next.before);
        add(next.level + 1, node, 0, next.cost);
    }
    return tree;
}

}  // namespace dflash
