// Finds the continuations of a text in the text itself, as dictionary coders do (Ziv and Lempel
// 1977): n-grams of four lengths by their rolling hash, each place with the one before it.

#include "copy_index.h"

#include <algorithm>

namespace dflash {

namespace {

constexpr uint64_t base = 0x5851F42D4C957F2Dull;
constexpr int first_bits = 12;
// Places of one n-gram that are looked at: more find little, and a text of one token has all.
constexpr int most_looks = 16;
constexpr size_t most_matches = 8;
// Beyond so many equal tokens a longer match says no more.
constexpr int32_t longest = 33;
// An edit is shorter than this; what comes later is found like any other match.
constexpr int32_t edit_window = 16;
// A copy that was followed for fewer tokens is not worth going back to.
constexpr int32_t least_followed = 4;

int length_class(int32_t length) {
    constexpr std::array<int32_t, copy_index::n_lengths - 1> ends = {0, 1, 2, 3, 5, 8, 16, 32};
    return static_cast<int>(std::lower_bound(ends.begin(), ends.end(), length) - ends.begin());
}

}  // namespace

copy_index::copy_index() : shift_(64 - first_bits) {
    constexpr std::array<int, 4> orders = {16, 8, 4, 2};
    for (size_t i = 0; i < orders.size(); i++) {
        uint64_t power = 1;
        for (int j = 0; j < orders[i]; j++) {
            power *= base;
        }
        tables_[i] = {orders[i], power, 0, std::vector<int32_t>(size_t(1) << first_bits), {}};
    }
}

size_t copy_index::n_bytes() const {
    size_t n = text_.capacity();
    for (const table & t : tables_) {
        n += t.last.capacity() + t.before.capacity();
    }
    return n * sizeof(int32_t);
}

void copy_index::extend(const std::vector<int32_t> & tokens) {
    grow(text_.size() + tokens.size());
    for (const int32_t token : tokens) {
        follow(token);
        add(token);
    }
}

void copy_index::add(int32_t token) {
    text_.push_back(token);
    const auto end = static_cast<int32_t>(text_.size());
    for (table & t : tables_) {
        enter(t, end);
    }
}

// Note the n-gram that ends before `end`; those that end earlier are noted already.
void copy_index::enter(table & t, int32_t end) {
    t.hash = t.hash * base + static_cast<uint32_t>(text_[end - 1]) + 1;
    if (end > t.order) {
        t.hash -=
            t.power * (static_cast<uint64_t>(static_cast<uint32_t>(text_[end - 1 - t.order])) + 1);
    }
    int32_t before = 0;
    if (end >= t.order) {
        int32_t & last = t.last[slot(t.hash)];
        before = last;
        last = end;
    }
    t.before.push_back(before);
}

// Make the tables large enough for n tokens.
void copy_index::grow(size_t n) {
    int bits = 64 - shift_;
    if (n <= size_t(1) << bits) {
        return;
    }
    while (n > size_t(1) << bits) {
        bits++;
    }
    shift_ = 64 - bits;
    for (table & t : tables_) {
        t.last.assign(size_t(1) << bits, 0);
        t.before.clear();
        t.hash = 0;
        for (int32_t end = 1; end <= static_cast<int32_t>(text_.size()); end++) {
            enter(t, end);
        }
    }
}

// Before a token is added: whether it goes on with the copy that is followed, or begins one.
void copy_index::follow(int32_t token) {
    if (is_followed_ && at(source_.begin, 0) == token) {
        source_.begin++;
        source_.length++;
        n_followed_++;
    } else {
        if (is_followed_ && n_followed_ >= least_followed) {
            left_at_ = source_.begin;
            n_since_ = 0;
        }
        is_followed_ = false;
        for (const place & p : offered_) {
            if (at(p.begin, 0) == token) {
                const bool is_new = p.from == found;
                source_ = {p.begin + 1, p.length + 1, is_new ? found : resumed};
                is_followed_ = true;
                n_followed_ = is_new ? 1 : least_followed;
                break;
            }
        }
    }
    offered_.clear();
    n_since_++;
    if (n_since_ > edit_window || (is_followed_ && n_followed_ >= least_followed)) {
        left_at_ = -1;
    }
}

// How many tokens before a place equal those at the end of the text, at most `most`.
int32_t copy_index::match_length(int32_t begin, int32_t most) const {
    const auto n = static_cast<int32_t>(text_.size());
    most = std::min(most, begin);
    int32_t length = 0;
    while (length < most && text_[begin - 1 - length] == text_[n - 1 - length]) {
        length++;
    }
    return length;
}

bool copy_index::goes_on(const copy_index & other) const {
    const table & t = tables_[0];
    const auto order = static_cast<size_t>(t.order);
    if (text_.size() <= order || other.text_.size() < order) {
        return false;
    }
    const auto end = other.text_.end();
    // The rolling hash of the other's end counts these tokens alone, as ours do.
    int32_t place = t.last[slot(other.tables_[0].hash)];
    for (int i = 0; place > 0 && i < most_looks; i++) {
        if (static_cast<size_t>(place) < text_.size() &&
            std::equal(end - t.order, end, text_.begin() + place - t.order)) {
            return true;
        }
        place = t.before[place - 1];
    }
    return false;
}

bool copy_index::begins_with(const copy_index & other) const {
    return other.text_.size() <= text_.size() &&
           std::equal(other.text_.begin(), other.text_.end(), text_.begin());
}

// The token so many after a place. Beyond the end of the text, a copy of itself goes on.
int32_t copy_index::at(int32_t begin, int32_t offset) const {
    const int32_t n = static_cast<int32_t>(text_.size()) - begin;
    return text_[begin + (offset < n ? offset : offset % n)];  // a division takes its time
}

// The last places of the longest n-grams at the end of the text.
void copy_index::find_matches(std::vector<place> & places) const {
    const auto n = static_cast<int32_t>(text_.size());
    for (const table & t : tables_) {
        if (n < t.order) {
            continue;
        }
        int32_t begin = t.before[n - 1];
        for (int i = 0; begin > 0 && i < most_looks && places.size() < most_matches; i++) {
            const int32_t length = match_length(begin, longest);
            if (length >= t.order) {
                places.push_back({begin, length, found});
            }
            begin = t.before[begin - 1];
        }
        if (!places.empty()) {
            break;
        }
    }
    std::stable_sort(places.begin(), places.end(),
                     [](const place & a, const place & b) { return a.length > b.length; });
}

// Where the copy that was left may go on.
void copy_index::find_behind(std::vector<place> & places) const {
    if (left_at_ < 0) {
        return;
    }
    const auto n = static_cast<int32_t>(text_.size());
    place best = {0, 0, resumed};
    for (int32_t begin = left_at_ + 1; begin < std::min(left_at_ + edit_window, n); begin++) {
        const int32_t length = match_length(begin, std::min(n_since_, begin - left_at_));
        if (length > best.length) {
            best = {begin, length, resumed};
        }
    }
    if (best.length > 0) {
        places.push_back(best);
    }
    if (n_since_ == 1) {
        if (left_at_ + 1 < n) {
            places.push_back({left_at_ + 1, 0, replaced});
        }
        places.push_back({left_at_, 0, inserted});
    }
}

std::vector<text_copy> copy_index::find(int n_copies, int n_tokens) {
    std::vector<place> places;
    find_matches(places);
    if (is_followed_) {
        place source = source_;
        if (source.from == found || source.length >= longest) {
            source = {source.begin, match_length(source.begin, longest), found};
        }
        const auto is_same = [&](const place & p) { return p.begin == source.begin; };
        places.erase(std::remove_if(places.begin(), places.end(), is_same), places.end());
        const auto is_shorter = [&](const place & p) { return p.length <= source.length; };
        places.insert(std::find_if(places.begin(), places.end(), is_shorter), source);
    }
    std::vector<place> behind;
    find_behind(behind);
    for (const place & p : behind) {
        const auto is_same = [&](const place & other) { return other.begin == p.begin; };
        places.erase(std::remove_if(places.begin(), places.end(), is_same), places.end());
    }
    places.insert(places.begin(), behind.begin(), behind.end());
    offered_ = places;
    std::vector<text_copy> copies;
    for (size_t i = 0; i < places.size() && static_cast<int>(copies.size()) < n_copies; i++) {
        copies.push_back(read(places, i, n_tokens));
    }
    return copies;
}

// The continuation at one of these places. The others say whether they agree.
text_copy copy_index::read(const std::vector<place> & places, size_t i, int n_tokens) const {
    const place & own = places[i];
    std::vector<int32_t> others;
    for (const place & p : places) {
        if (p.begin != own.begin && p.length > 0) {
            others.push_back(p.begin);
        }
    }
    text_copy copy;
    copy.tokens.reserve(n_tokens);
    copy.cells.reserve(n_tokens);
    for (int j = 0; j < n_tokens; j++) {
        const int32_t token = at(own.begin, j);
        const auto differs = [&](int32_t begin) { return at(begin, j) != token; };
        const size_t n_before = others.size();
        others.erase(std::remove_if(others.begin(), others.end(), differs), others.end());
        const int agreement = n_before == 0 ? 0 : others.size() == n_before ? 1 : 2;
        const int from = own.from == found || j == 0 ? own.from : resumed;
        copy.tokens.push_back(token);
        copy.cells.push_back((from * n_agreements + agreement) * n_lengths +
                             length_class(own.length + j));
    }
    return copy;
}

}  // namespace dflash
