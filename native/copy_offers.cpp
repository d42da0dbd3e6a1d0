#include "copy_offers.h"

#include <algorithm>
#include <utility>

namespace dflash {

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
    index.extend(written.data(), written.size());
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
