// Learns from what became of all copies that were offered.

#include "copy_chances.h"

#include <algorithm>
#include <utility>

namespace dflash {

namespace {

// Of a copied token before any is seen, by how much before it matches: from texts that repeat half
// of their lines. Without them, the first copies of a new model are offered in vain or too late.
constexpr std::array<double, copy_index::n_lengths> cold = {0.3, 0.5,  0.4,  0.5, 0.6,
                                                            0.7, 0.85, 0.93, 0.97};
// Observations that these count for. With many more, a model that never repeats drafts in vain.
constexpr double doubt = 4.0;
// Observations of a kind after which older ones fade. Without it, what a model does is never learnt
// again after it has changed.
constexpr double memory = 400.0;
// Observations that those of other requests count for in a request. With many more, a request that
// repeats nothing pays for those that do.
constexpr double ties = 8.0;
// The class of lengths from which a match is a long one: more than five tokens. Short matches come
// by chance in a text that repeats nothing, so whether they mean anything is known for each request
// apart from the long ones. As one, a stretch of new text would cast doubt on the copies after it.
constexpr int first_long = 5;
// Right tokens of short matches that were expected where nothing was offered at all. A text that
// repeats is seldom without an offer. With none, a text that repeats nothing has so few offers that
// each of them is tried, at the price of a graph.
constexpr double silence = 0.2;
// Of what was expected and seen in a request, what still counts after one more token. Without
// fading, a text that turns from new to copied is distrusted for as long as it was new.
constexpr double fades = 0.97;

bool is_long(int kind) { return kind % copy_index::n_lengths >= first_long; }

double cold_chance(int kind) {
    const int opinion = kind / copy_index::n_cells;
    const int cell = kind % copy_index::n_cells;
    const int agreement = cell / copy_index::n_lengths % copy_index::n_agreements;
    double wrong = 1.0 - cold[cell % copy_index::n_lengths];
    wrong *= agreement == 1 ? 0.7 : 1.0;
    const double right = (1.0 - wrong) * (agreement == 2 ? 0.6 : 1.0);
    if (opinion == 1) {
        return 1.0 - 0.3 * (1.0 - right);
    }
    return right * (opinion == 2 ? 0.6 : 1.0);
}

}  // namespace

copy_prior::copy_prior() : tried(n_copy_kinds, doubt), right(n_copy_kinds) {
    for (int kind = 0; kind < n_copy_kinds; kind++) {
        right[kind] = doubt * cold_chance(kind);
    }
}

void copy_prior::learn(int kind, bool is_right) {
    tried[kind] += 1.0;
    right[kind] += is_right;
    if (tried[kind] > memory) {
        tried[kind] *= 0.5;
        right[kind] *= 0.5;
    }
}

copy_chances::copy_chances(copy_prior & prior) : prior_(prior) { known_.fill(-1.0); }

std::vector<double> copy_chances::each(const std::vector<int32_t> & kinds) {
    std::array<double, 2> trust;
    for (int group = 0; group < 2; group++) {
        trust[group] = std::min(seen_[group] / expected_[group], 1.0);
    }
    std::vector<double> found;
    found.reserve(kinds.size());
    for (const int32_t kind : kinds) {
        double & known = known_[kind];
        if (known < 0.0) {
            known = chance(kind);
        }
        found.push_back(known * trust[is_long(kind)]);
    }
    return found;
}

void copy_chances::learn(int kind, bool is_right) {
    expect(is_long(kind), chance(kind), is_right);
    tried_[kind] += 1.0;
    right_[kind] += is_right;
    prior_.learn(kind, is_right);
    known_[kind] = chance(kind);
}

void copy_chances::learn_silence(int n) {
    for (int i = 0; i < n; i++) {
        expect(false, silence, false);
    }
}

// One right token of one is taken as seen, so that a group is never lost for good.
void copy_chances::expect(bool group, double chance, bool is_right) {
    expected_[group] = 1.0 + fades * (expected_[group] - 1.0) + chance;
    seen_[group] = 1.0 + fades * (seen_[group] - 1.0) + is_right;
}

// Never certain: a long copy then counts for what it can bring, and no more.
double copy_chances::chance(int kind) const {
    const double others = prior_.right[kind] / prior_.tried[kind];
    return std::min((right_[kind] + ties * others) / (tried_[kind] + ties), 0.999);
}

void copy_offers::learn(copy_index & index, const std::vector<int32_t> & written) {
    if (last.empty()) {
        chances.learn_silence(static_cast<int>(written.size()));
    }
    for (const offer & o : last) {
        const size_t n = std::min(o.tokens.size(), written.size());
        bool is_right = true;
        for (size_t i = 0; i < n && is_right; i++) {
            is_right = o.tokens[i] == written[i];
            chances.learn(o.kinds[i], is_right);
        }
    }
    last.clear();
    index.extend(written);
}

bool copy_offers::find(copy_index & index, int n_copies, int n_tokens, const double * least,
                       size_t n_least) {
    last.clear();
    if (n_tokens < 1) {
        return false;
    }
    bool pays = false;
    for (text_copy & copy : index.find(n_copies, n_tokens)) {
        offer o = {std::move(copy.tokens), std::move(copy.cells), {}};
        o.chances = chances.each(o.kinds);
        double curve = 1.0, expected = 0.0;
        pays = pays || !least;
        for (size_t k = 0; !pays && k < std::min(o.chances.size(), n_least); k++) {
            curve *= o.chances[k];
            expected += curve;
            pays = expected >= least[k];
        }
        last.push_back(std::move(o));
    }
    return pays;
}

}  // namespace dflash
