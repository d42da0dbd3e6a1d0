#include "row_ids.h"

#include <algorithm>
#include <unordered_set>

namespace dflash {

namespace {

using id_set = std::unordered_set<int32_t>;

id_set set_of(const std::vector<int32_t> & ids) {
    id_set set;  // filled as in llama.cpp: empty at first, then one id after the other
    for (const int32_t id : ids) {
        set.insert(id);
    }
    return set;
}

}  // namespace

std::vector<int32_t> leading_first(const std::vector<int32_t> & ids) {
    if (ids.size() < 2 || *set_of(ids).begin() == ids.front()) {
        return ids;
    }
    // What goes into an empty bucket comes out first (libstdc++) ...
    std::vector<int32_t> last(ids.rbegin(), ids.rend());
    id_set set = set_of(last);
    if (*set.begin() != ids.front()) {
        // ... and into a bucket that is not, before the others of this bucket.
        const size_t bucket = set.bucket(ids.front());
        std::stable_partition(last.begin(), last.end(),
                              [&](int32_t id) { return set.bucket(id) != bucket; });
    }
    return last;
}

}  // namespace dflash
