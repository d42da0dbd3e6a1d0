#include "draw.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "largest.h"

namespace dflash {

namespace {

constexpr int chunk = 256;

bool is_before(const llama_token_data & a, const llama_token_data & b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

bool has_lower_id(const llama_token_data & a, const llama_token_data & b) { return a.id < b.id; }

void apply(llama_sampler * chain, std::vector<llama_token_data> & data) {
    llama_token_data_array array{data.data(), data.size(), -1, false};
    llama_sampler_apply(chain, &array);
}

// Whether the first k are in this order, and no others are among them. `most_outside`: no logit
// that is not in `sorted` is larger.
bool are_the_best(const std::vector<llama_token_data> & sorted, size_t k, float most_outside) {
    if (k > sorted.size()) {
        return false;
    }
    for (size_t i = 0; i < k; i++) {
        const float next = i + 1 < sorted.size() ? sorted[i + 1].logit : most_outside;
        if (!(sorted[i].logit > next)) {
            return false;
        }
    }
    return sorted[k - 1].logit > most_outside;
}

}  // namespace

draw_needs token_draw::needs() const {
    if (rule_.altering == nullptr && rule_.choosing == nullptr) {
        return rule_.temperature > 0.0f ? draw_needs::sums : draw_needs::best;
    }
    if (rule_.n_candidates == 0) {
        return draw_needs::row;
    }
    const bool is_nucleus = rule_.choosing != nullptr && rule_.top_k == 0 && rule_.top_p < 1.0f;
    return is_nucleus ? draw_needs::candidates_and_sum : draw_needs::candidates;
}

void token_draw::accept(int32_t token) {
    if (rule_.altering != nullptr) {
        llama_sampler_accept(rule_.altering, token);
    }
}

void token_draw::settle(int32_t token) {
    is_first_ = false;
    if (token >= 0 && !rule_.bound) {
        accept(token);
    }
}

int32_t token_draw::from_row(const float * row) {
    if (rule_.altering == nullptr && rule_.choosing == nullptr) {
        if (rule_.temperature > 0.0f) {
            return from_all(row);
        }
        const int32_t best = largest_of(row, rule_.n_vocab);
        return best < 0 ? nothing_left : best;
    }
    take(row);
    if (rule_.choosing == nullptr && rule_.temperature > 0.0f) {
        std::vector<float> altered(data_.size());
        std::transform(data_.begin(), data_.end(), altered.begin(),
                       [](const llama_token_data & token) { return token.logit; });
        return from_all(altered.data());
    }
    if (rule_.choosing == nullptr) {
        // The first of equal ones, as llama.cpp's greedy sampler.
        const auto chosen = std::min_element(data_.begin(), data_.end(), is_before);
        return chosen->logit == -INFINITY ? nothing_left : chosen->id;
    }
    return choose(/*is_cut=*/false);
}

// Makes `data_` of a row, altered.
void token_draw::take(const float * row) {
    data_.resize(rule_.n_vocab);
    for (int32_t i = 0; i < rule_.n_vocab; i++) {
        data_[i] = {i, row[i], 0.0f};
    }
    if (rule_.altering != nullptr) {
        apply(rule_.altering, data_);
    }
}

int32_t token_draw::from_candidates(const int32_t * ids, const float * logits, int n,
                                    double log_sum) {
    if (n < 1) {
        return needs_whole_row;
    }
    data_.resize(n);
    for (int i = 0; i < n; i++) {
        data_[i] = {ids[i], logits[i], 0.0f};
    }
    float most_outside = n < rule_.n_vocab ? logits[n - 1] : -INFINITY;
    if (rule_.altering != nullptr) {
        apply(rule_.altering, data_);
        most_outside += rule_.most_raised;
        std::sort(data_.begin(), data_.end(), is_before);
    }
    if (rule_.choosing == nullptr) {
        return data_[0].logit > most_outside ? data_[0].id : needs_whole_row;
    }
    if (rule_.top_k > 0) {
        const size_t k = std::min(rule_.top_k, rule_.n_vocab);
        return choose_among(k, most_outside, /*is_cut=*/false);
    }
    if (rule_.top_p < 1.0f) {
        const size_t k = nucleus(log_sum);
        return k == 0 ? needs_whole_row : choose_among(k, most_outside, /*is_cut=*/true);
    }
    // min-p keeps logits from this one on, in the order of the row. The margin is for rounding.
    const float least = data_[0].logit + std::log(rule_.min_p);
    const float margin = 1e-5f * (1.0f + std::abs(data_[0].logit));
    if (!(least - margin > most_outside)) {
        return needs_whole_row;
    }
    std::sort(data_.begin(), data_.end(), has_lower_id);
    return choose(/*is_cut=*/false);
}

// Draws from the first k of `data_`, in descending order.
int32_t token_draw::choose_among(size_t k, float most_outside, bool is_cut) {
    const bool are_known =
        k <= data_.size() && data_[k - 1].logit >= most_outside && data_[k - 1].logit > -INFINITY;
    if (!are_known || (rule_.reorders && !are_the_best(data_, k, most_outside))) {
        return needs_whole_row;
    }
    std::vector<float> logits;  // which the samplers change
    for (const llama_token_data & token : data_) {
        logits.push_back(token.logit);
    }
    data_.resize(is_cut ? k : data_.size());
    const int32_t token = choose(is_cut);
    if (rule_.reorders) {
        return token;
    }
    const size_t i = place_;
    const float next = i + 1 < logits.size() ? logits[i + 1] : -INFINITY;
    const bool is_alone =
        logits[i] > std::max(next, most_outside) && (i == 0 || logits[i - 1] > logits[i]);
    return is_alone ? token : needs_order;
}

int32_t token_draw::in_order_of(const float * row) {
    const auto place = place_;
    take(row);
    apply(rule_.cutting, data_);
    return data_[place].id;
}

// How many tokens top-p keeps; 0 if it keeps more than there are, or if its rounding might matter.
size_t token_draw::nucleus(double log_sum) const {
    std::vector<double> sums;
    double sum = 0.0;
    for (const llama_token_data & token : data_) {
        sums.push_back(sum += std::exp(token.logit - log_sum));
    }
    // llama.cpp adds up the whole row in single precision. Each token is rounded away by half a
    // unit in the last place of the sum at most, or by its own share if that is less.
    constexpr double unit = 1.0 / (1 << 24);
    const double others = std::min(std::max(1.0 - sum, 0.0) + 1e-5, rule_.n_vocab * unit);
    const double margin = others + static_cast<double>(data_.size()) * unit + 2e-5;
    const auto found = std::upper_bound(sums.begin(), sums.end(), rule_.top_p - margin);
    if (found == sums.end() || *found < rule_.top_p + margin) {
        return 0;
    }
    return static_cast<size_t>(found - sums.begin()) + 1;
}

// In [0, 1), as llama.cpp draws it.
double token_draw::number() {
    if (unused_) {
        const double number = *unused_;
        unused_.reset();
        return number;
    }
    return std::uniform_real_distribution<double>(0.0, 1.0)(random_);
}

int32_t token_draw::from_all(const float * row) {
    const int n = rule_.n_vocab;
    const int32_t best = largest_of(row, n);
    if (best < 0) {
        return nothing_left;
    }
    const float peak = row[best] / rule_.temperature;
    const auto weight = [&](int i) { return std::exp(row[i] / rule_.temperature - peak); };
    // The sum after each chunk. A search in one chunk then goes through the very same sums.
    std::vector<double> sums;
    double sum = 0.0;
    for (int begin = 0; begin < n; begin += chunk) {
        for (int i = begin; i < std::min(begin + chunk, n); i++) {
            sum += weight(i);
        }
        sums.push_back(sum);
    }
    const double target = sum * number();
    const auto found = std::lower_bound(sums.begin(), sums.end(), target);
    const auto index = static_cast<int>(found - sums.begin());
    int i = index * chunk;
    for (sum = index > 0 ? sums[index - 1] : 0.0; i < n; i++) {
        sum += weight(i);
        if (sum >= target) {
            break;
        }
    }
    i = std::min(i, n - 1);
    return row[i] == -INFINITY ? nothing_left : i;
}

int32_t token_draw::chunk_of(const float * sums, int n, float peak) {
    const double total = std::accumulate(sums, sums + n, 0.0);
    const double drawn = number();
    unused_ = drawn;  // until a token is found
    // Of exp: several units in the last place, and more with its argument, which is rounded, too.
    constexpr double unit = 1.0 / (1 << 24);
    chunk_.margin = total * unit * (512.0 + 8.0 * std::abs(peak) / rule_.temperature);
    chunk_.target = total * drawn;
    chunk_.peak = peak;
    chunk_.before = 0.0;
    for (int i = 0; i < n; i++) {
        const double after = chunk_.before + sums[i];
        if (after >= chunk_.target) {
            const bool is_sure = chunk_.target - chunk_.before > chunk_.margin &&
                                 after - chunk_.target > chunk_.margin;
            return is_sure ? i : needs_whole_row;
        }
        chunk_.before = after;
    }
    return needs_whole_row;
}

int32_t token_draw::from_chunk(const float * logits, int n) {
    const float peak = chunk_.peak / rule_.temperature;
    double sum = chunk_.before;
    for (int i = 0; i < n; i++) {
        const double before = sum;
        sum += std::exp(logits[i] / rule_.temperature - peak);
        if (sum >= chunk_.target) {
            const bool is_sure =
                chunk_.target - before > chunk_.margin && sum - chunk_.target > chunk_.margin;
            if (!is_sure) {
                break;
            }
            unused_.reset();
            return i;
        }
    }
    return needs_whole_row;
}

// Draws from `data_`. If that is cut already, it is in order, too.
int32_t token_draw::choose(bool is_cut) {
    llama_token_data_array array{data_.data(), data_.size(), -1, /*sorted=*/is_cut};
    if (!is_cut && rule_.cutting != nullptr) {
        llama_sampler_apply(rule_.cutting, &array);
    }
    llama_sampler_apply(rule_.choosing, &array);
    const llama_token_data & chosen = array.data[array.selected];
    place_ = &chosen - data_.data();
    return chosen.logit == -INFINITY ? nothing_left : chosen.id;
}

}  // namespace dflash
