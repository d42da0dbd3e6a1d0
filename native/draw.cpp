#include "draw.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "largest.h"

namespace dflash {

namespace {

constexpr int chunk = 128;  // of a row: it is gone through at once, and its sums are few
constexpr int n_lanes = 16;
constexpr double unit = 1.0 / (1 << 24);  // of floats near 1
constexpr rounding of_host{1.0, 0.0};     // see `exps_of`

// exp(x) for n numbers, none above 0, in place: of those below -80, exp(-80). Written so that
// compilers turn it into vectors. Within 1.4 units in the last place, 0.5 in the mean square; the
// polynomial is that of Cephes' expf.
void exps_of(float * x, int n) {
    constexpr float least = -80.0f;
    constexpr float log2_e = 1.44269504f;
    constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: the sum's last bits are the integer
    for (int i = 0; i < n; i++) {
        x[i] = x[i] > least ? x[i] : least;
    }
    for (int i = 0; i < n; i++) {
        const float shifted = x[i] * log2_e + to_integer;
        const float power = shifted - to_integer;
        const float r = (x[i] - power * 0.693359375f) - power * -2.12194440e-4f;
        float p = 1.9875691500e-4f;
        p = p * r + 1.3981999507e-3f;
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
        p = p * r + 5.0000001201e-1f;
        p = p * r * r + r + 1.0f;
        uint32_t exponent;
        uint32_t bits;
        std::memcpy(&exponent, &shifted, sizeof(float));
        std::memcpy(&bits, &p, sizeof(float));
        bits += exponent << 23;
        std::memcpy(&x[i], &bits, sizeof(float));
    }
}

// The sum of exp((x - peak) / T) in each chunk of a row.
std::vector<float> sum_chunks(const float * row, int n, float peak, float temperature) {
    std::vector<float> sums;
    std::array<float, chunk> e;
    const float top = peak / temperature;
    for (int begin = 0; begin < n; begin += chunk) {
        const int size = std::min(chunk, n - begin);
        e.fill(-INFINITY);
        for (int i = 0; i < size; i++) {
            e[i] = row[begin + i] / temperature - top;
        }
        exps_of(e.data(), chunk);
        std::array<float, n_lanes> lanes{};
        for (int i = 0; i < chunk; i += n_lanes) {
            for (int lane = 0; lane < n_lanes; lane++) {
                lanes[lane] += e[i + lane];
            }
        }
        sums.push_back(std::accumulate(lanes.begin(), lanes.end(), 0.0f));
    }
    return sums;
}

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

token_draw::token_draw(draw_rule rule) : rule_(std::move(rule)), random_(rule_.seed) {
    if (rule_.n_candidates < 0 || rule_.n_candidates > rule_.n_vocab) {
        throw std::invalid_argument(std::to_string(rule_.n_candidates) + " candidates of " +
                                    std::to_string(rule_.n_vocab) + " tokens");
    }
}

draw_needs token_draw::needs() const {
    if (rule_.bias_chain == nullptr && rule_.pick_chain == nullptr) {
        return rule_.temperature > 0.0f ? draw_needs::sums : draw_needs::best;
    }
    if (rule_.n_candidates == 0) {
        return draw_needs::row;
    }
    const bool is_nucleus = rule_.pick_chain != nullptr && rule_.top_k == 0 && rule_.top_p < 1.0f;
    return is_nucleus ? draw_needs::candidates_and_sum : draw_needs::candidates;
}

void token_draw::accept(int32_t token) {
    if (rule_.bias_chain != nullptr) {
        llama_sampler_accept(rule_.bias_chain.get(), token);
    }
}

void token_draw::settle(int32_t token) {
    is_first_ = false;
    if (token >= 0 && !rule_.bound) {
        accept(token);
    }
}

int32_t token_draw::from_row(const float * row) {
    if (rule_.bias_chain == nullptr && rule_.pick_chain == nullptr) {
        if (rule_.temperature > 0.0f) {
            return from_all(row);
        }
        const int32_t best = largest_of(row, rule_.n_vocab);
        return best < 0 ? nothing_left : best;
    }
    take(row);
    if (rule_.pick_chain == nullptr && rule_.temperature > 0.0f) {
        std::vector<float> altered(data_.size());
        std::transform(data_.begin(), data_.end(), altered.begin(),
                       [](const llama_token_data & token) { return token.logit; });
        return from_all(altered.data());
    }
    if (rule_.pick_chain == nullptr) {
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
    if (rule_.bias_chain != nullptr) {
        apply(rule_.bias_chain.get(), data_);
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
    if (rule_.bias_chain != nullptr) {
        apply(rule_.bias_chain.get(), data_);
        most_outside += rule_.most_raised;
        std::sort(data_.begin(), data_.end(), is_before);
    }
    if (rule_.pick_chain == nullptr) {
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
    apply(rule_.filter_chain.get(), data_);
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
    const std::vector<float> sums = sum_chunks(row, n, row[best], rule_.temperature);
    const int32_t index = place_in(sums.data(), static_cast<int>(sums.size()), row[best], of_host);
    if (index >= 0) {
        const int begin = index * chunk;
        const int32_t place = from_chunk(row + begin, std::min(chunk, n - begin));
        if (place >= 0) {
            return begin + place;
        }
    }
    const float peak = row[best] / rule_.temperature;
    std::vector<double> until(n);
    double sum = 0.0;
    for (int i = 0; i < n; i++) {
        until[i] = sum += std::exp(row[i] / rule_.temperature - peak);
    }
    const auto found = std::lower_bound(until.begin(), until.end(), sum * number());
    const auto i = std::min(static_cast<int>(found - until.begin()), n - 1);
    return row[i] == -INFINITY ? nothing_left : i;
}

int32_t token_draw::chunk_of(const float * sums, int n, float peak) {
    // Of a product with 1 / T, which has an error of its own, the constant in a fast exp, and exp.
    const double inverse = 1.0f / rule_.temperature;
    const double common = std::abs(inverse * rule_.temperature - 1.0) / unit + 0.25;
    const double each = 2.0 + 0.5 * (std::abs(peak) / rule_.temperature + 16.0);
    return place_in(sums, n, peak, {each, common});
}

int32_t token_draw::place_in(const float * sums, int n, float peak, const rounding & kind) {
    double total = 0.0;
    double squares = 0.0;
    for (int i = 0; i < n; i++) {
        total += sums[i];
        squares += static_cast<double>(sums[i]) * sums[i];
    }
    const double drawn = number();
    unused_ = drawn;  // until a token is found
    // What is rounded by chance adds up as a random walk. No exponential is above 1, so the sum of
    // their squares is not above their sum. A sum of a chunk is off by two units itself. Six times
    // the root of the mean square is exceeded once in 5e8 draws that are as near as that.
    const double by_chance = 6.0 * (kind.each * std::sqrt(total) + 2.0 * std::sqrt(squares));
    // What is common to all shifts the logits by a part of themselves, and so the share of the
    // tokens before one by no more than half of their standard deviation. In nats that is at most
    // log(n) / 2, and one for the rest.
    const double shifted = kind.common * total * (0.25 * std::log(rule_.n_vocab) + 0.5);
    chunk_.margin = unit * (by_chance + shifted);
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
    if (!is_cut && rule_.filter_chain != nullptr) {
        llama_sampler_apply(rule_.filter_chain.get(), &array);
    }
    llama_sampler_apply(rule_.pick_chain.get(), &array);
    const llama_token_data & chosen = array.data[array.selected];
    place_ = &chosen - data_.data();
    return chosen.logit == -INFINITY ? nothing_left : chosen.id;
}

}  // namespace dflash
