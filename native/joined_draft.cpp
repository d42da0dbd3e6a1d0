#include "joined_draft.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace dflash {

namespace {

// Nodes by parent and token, parents before their children.
class merged_tree {
  public:
    std::vector<int32_t> tokens;
    std::vector<int32_t> parents;
    std::vector<double> steps;  // the chance of each node where its parent is right
    std::vector<bool> copied;

    // The node of that token, which has at least that chance.
    int add(int parent, int32_t token, double chance, bool is_copied) {
        int last = -1;
        for (int node = first_[parent + 1]; node >= 0; node = next_[node]) {
            if (tokens[node] == token) {
                steps[node] = std::max(steps[node], chance);
                return node;
            }
            last = node;
        }
        const auto node = static_cast<int>(tokens.size());
        (last < 0 ? first_[parent + 1] : next_[last]) = node;
        first_.push_back(-1);
        next_.push_back(-1);
        tokens.push_back(token);
        parents.push_back(parent);
        steps.push_back(chance);
        copied.push_back(is_copied);
        return node;
    }

    // Of each node, that it and all before it are right. Those of one node's children sum to at
    // most its own.
    std::vector<double> chances() const {
        std::vector<double> totals(tokens.size() + 1, 0.0), found;
        for (size_t node = 0; node < tokens.size(); node++) {
            totals[parents[node] + 1] += steps[node];
        }
        for (size_t node = 0; node < tokens.size(); node++) {
            const double before = parents[node] < 0 ? 1.0 : found[parents[node]];
            found.push_back(before * steps[node] / std::max(totals[parents[node] + 1], 1.0));
        }
        return found;
    }

  private:
    std::vector<int> first_ = {-1};  // child, of the anchor and of each node
    std::vector<int> next_;          // sibling
};

// The path from the anchor on which most tokens are expected.
std::vector<int> best_path(const std::vector<int32_t> & parents,
                           const std::vector<double> & chances) {
    std::vector<double> values = chances;
    std::vector<int> best(parents.size(), -1);  // of each node, the child to go on with
    int first = -1;
    double most = 0.0;
    for (int node = static_cast<int>(parents.size()) - 1; node >= 0; node--) {
        if (best[node] >= 0) {
            values[node] += values[best[node]];
        }
        const int parent = parents[node];
        if (parent < 0) {
            if (values[node] >= most) {
                first = node;
                most = values[node];
            }
        } else if (best[parent] < 0 || values[node] >= values[best[parent]]) {
            best[parent] = node;
        }
    }
    std::vector<int> path;
    for (; first >= 0; first = best[first]) {
        path.push_back(first);
    }
    return path;
}

// The likeliest nodes. One that would be a leaf too many is left out with all below it.
std::vector<int> likeliest(const std::vector<int32_t> & parents,
                           const std::vector<double> & chances, int n_nodes, int n_leaves) {
    std::vector<int> order(parents.size());
    std::iota(order.begin(), order.end(), 0);
    // A child is never likelier than its parent, which comes before it.
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return chances[a] > chances[b]; });
    std::vector<int> chosen;
    std::vector<bool> kept(parents.size() + 1, false), inner(parents.size() + 1, false);
    kept[0] = true;  // the anchor
    for (const int node : order) {
        if (static_cast<int>(chosen.size()) >= n_nodes) {
            break;
        }
        const int parent = parents[node] + 1;
        const bool forks = inner[parent] || chosen.empty();
        if (!kept[parent] || (forks && n_leaves <= 0)) {
            continue;
        }
        n_leaves -= forks;
        chosen.push_back(node);
        kept[node + 1] = inner[parent] = true;
    }
    return chosen;
}

}  // namespace

joined_draft join_copies(const std::vector<int32_t> & tokens, const std::vector<int32_t> & parents,
                         const std::vector<double> & chances,
                         const std::vector<copied_text> & copies, int n_nodes, int n_leaves) {
    merged_tree tree;
    std::vector<int> nodes;  // of the drafter's
    for (size_t i = 0; i < std::min(tokens.size(), chances.size()); i++) {
        const int parent = parents[i];
        const double before = parent < 0 ? 1.0 : chances[parent];
        const double step = before > 0.0 ? chances[i] / before : 0.0;
        nodes.push_back(tree.add(parent < 0 ? -1 : nodes[parent], tokens[i], step, false));
    }
    for (const copied_text & copy : copies) {
        int node = -1;
        for (size_t i = 0; i < copy.tokens.size(); i++) {
            node = tree.add(node, copy.tokens[i], copy.chances[i], true);
        }
    }
    const std::vector<double> all = tree.chances();
    std::vector<int> chosen = n_leaves == 1 ? best_path(tree.parents, all)
                                            : likeliest(tree.parents, all, n_nodes, n_leaves);
    chosen.resize(std::min(chosen.size(), static_cast<size_t>(std::max(n_nodes, 0))));
    std::vector<int> place(all.size() + 1, -1);  // in the draft; the anchor's first
    joined_draft draft;
    for (const int node : chosen) {
        place[node + 1] = static_cast<int>(draft.tokens.size());
        draft.tokens.push_back(tree.tokens[node]);
        draft.parents.push_back(place[tree.parents[node] + 1]);
        draft.logprobs.push_back(
            static_cast<float>(std::log(std::max(tree.steps[node], least_chance))));
        draft.copied.push_back(tree.copied[node]);
        draft.chances.push_back(all[node]);
    }
    return draft;
}

}  // namespace dflash
