#include "draft_tree.h"

#include <algorithm>
#include <cmath>
#include <functional>
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

// Writes the candidates of a position that can be drafted, best first, and returns their number.
// in_order: so they are given.
int usable(const int32_t * ids, const float * logprobs, int k, int n_vocab, bool in_order,
           candidate * found) {
    int n = 0;
    float most = 0.0f;
    for (int i = 0; i < k; i++) {
        const bool is_known =
            std::any_of(found, found + n, [&](const candidate & c) { return c.token == ids[i]; });
        // A token whose log-probability is not a number is left out.
        if (ids[i] >= 0 && ids[i] < n_vocab && !is_known && logprobs[i] > -INFINITY) {
            const candidate next = {std::min(most, logprobs[i]), ids[i], i};
            most = in_order ? next.logprob : most;  // never above the one before
            candidate * at = found + n++;
            for (; !in_order && at > found && at[-1].logprob < next.logprob; at--) {
                *at = at[-1];
            }
            *at = next;
        }
    }
    return n;
}

// A node that may come next.
struct offer {
    double cost;  // minus the log-probability of its path
    int level;
    int parent;
    int rank;
    double before;    // the cost of its parent
    int after;        // the place of its parent, if that counts
    bool is_further;  // whether its parent is not on the path of first candidates
    float logprob;    // less likely by that

    bool operator>(const offer & o) const {
        return std::tie(cost, level, parent, rank) > std::tie(o.cost, o.level, o.parent, o.rank);
    }
};

}  // namespace

draft_tree grow_tree(const int32_t * ids, const float * logprobs, const float * steps,
                     int n_positions, int k, int n_vocab, const tree_bounds & bounds,
                     double further_share) {
    const auto further = static_cast<float>(std::log(further_share));
    const int depth = k > 0 ? std::max(std::min(n_positions, bounds.n_depth), 0) : 0;
    // By level and the place of the parent; filled as far as the tree has grown. A tree of 31 nodes
    // has as many rows: with a map of vectors it took 28 us, and a small model's round some 2 ms.
    const int n_after = steps != nullptr ? k : 1;
    std::vector<int> counts(static_cast<size_t>(depth) * n_after, -1);
    std::vector<candidate> rows(counts.size() * k);
    const auto row_of = [&](int level, int after) -> candidate * {
        const int at = level * n_after + after;
        candidate * row = rows.data() + at * k;
        if (counts[at] < 0) {
            const float * of_row = steps != nullptr ? steps + at * k : logprobs + at * k;
            counts[at] = usable(ids + level * k, of_row, k, n_vocab, steps == nullptr, row);
        }
        return row;
    };
    std::priority_queue<offer, std::vector<offer>, std::greater<>> waiting;
    const auto add = [&](int level, int parent, int rank, double before, int after,
                         bool is_further) {
        if (level >= depth) {
            return;
        }
        const candidate * row = row_of(level, after);
        if (rank < counts[level * n_after + after]) {
            const float logprob = row[rank].logprob + (is_further ? further : 0.0f);
            waiting.push(
                {before - logprob, level, parent, rank, before, after, is_further, logprob});
        }
    };
    draft_tree tree;
    int n_leaves = 0;
    if (bounds.n_leaves > 0) {
        add(0, -1, 0, 0.0, 0, false);
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
        const candidate chosen = row_of(next.level, next.after)[next.rank];
        tree.tokens.push_back(chosen.token);
        tree.parents.push_back(next.parent);
        tree.logprobs.push_back(next.logprob);
        add(next.level, next.parent, next.rank + 1, next.before, next.after, next.is_further);
        add(next.level + 1, node, 0, next.cost, steps != nullptr ? chosen.place : 0,
            next.is_further || chosen.place > 0);
    }
    return tree;
}

void rate_candidates(float * logprobs, float * steps, const std::vector<double> & chances, int k) {
    const auto least = static_cast<float>(std::log(least_chance));
    for (size_t i = 0; i < chances.size(); i++, logprobs += k) {
        const double rest =
            std::max(1.0 - std::exp(std::min(double(logprobs[0]), 0.0)), least_chance);
        const auto own = static_cast<float>(std::log(std::max(chances[i], least_chance)));
        const auto others =
            static_cast<float>(std::log(std::max(1.0 - chances[i], least_chance) / rest));
        // `min` keeps what is not a number as it is, and `fmax` drops it.
        logprobs[0] = own;
        for (int j = 1; j < k; j++) {
            logprobs[j] = std::fmax(std::min(logprobs[j] + others, own), least);
        }
        if (steps != nullptr) {
            // After other tokens, what a step is worth is corrected like that of another candidate.
            std::copy_n(logprobs, k, steps);
            for (int j = k; j < k * k; j++) {
                steps[j] = std::fmax(std::min(steps[j] + others, 0.0f), least);
            }
            steps += k * k;
        }
    }
}

}  // namespace dflash
