// The index of what a text repeats: random texts over few tokens, in pieces of any size.

#include <random>

#include "check.h"
#include "copy_chances.h"
#include "copy_index.h"

namespace {

void random_texts() {
    std::mt19937 random(1);
    for (int round = 0; round < 200; round++) {
        std::uniform_int_distribution<int32_t> token(0, round % 7);
        std::uniform_int_distribution<int> size(0, 40);
        dflash::copy_index index;
        size_t n = 0;
        for (int piece = 0; piece < 40; piece++) {
            std::vector<int32_t> tokens(size(random));
            for (int32_t & t : tokens) {
                t = token(random);
            }
            index.extend(tokens);
            n += tokens.size();
            check::equal(index.size(), n, "tokens");
            for (const auto & copy : index.find(4, 63)) {
                check::equal(copy.tokens.size(), size_t(63), "tokens of a copy");
                for (const int32_t cell : copy.cells) {
                    check::that(cell >= 0 && cell < dflash::copy_index::n_cells, "a known cell");
                }
            }
        }
    }
}

void long_texts() {
    dflash::copy_index index;
    for (int32_t i = 0; i < 20000; i++) {
        index.extend({i % 5000});
    }
    const auto copies = index.find(1, 8);
    check::equal(copies.size(), size_t(1), "copies");
    for (int32_t i = 0; i < 8; i++) {
        check::equal(copies[0].tokens[i], i, "the next token");
    }
}

void texts_of_others() {
    std::mt19937 random(2);
    std::uniform_int_distribution<int32_t> token(0, 1000);
    std::vector<int32_t> text(300);
    for (int32_t & t : text) {
        t = token(random);
    }
    dflash::copy_index whole;
    whole.extend(text);
    check::that(!whole.goes_on(whole), "it has its end only once");
    for (size_t n = 0; n <= text.size(); n++) {
        dflash::copy_index part;
        part.extend({text.begin(), text.begin() + n});
        check::equal(whole.begins_with(part), true, "a beginning");
        check::equal(part.begins_with(whole), n == text.size(), "more than a beginning");
        check::equal(whole.goes_on(part), n >= 16 && n < text.size(), "more behind its end");
        part.extend(whole);
        check::equal(part.size(), n + text.size(), "tokens of both");
    }
}

void offers_of_random_texts() {
    std::mt19937 random(3);
    dflash::copy_prior prior;
    for (int round = 0; round < 50; round++) {
        std::uniform_int_distribution<int32_t> token(0, 1 + round % 7);
        std::uniform_int_distribution<int> size(0, 20);
        dflash::copy_index index;
        dflash::copy_offers offers(prior);
        for (int piece = 0; piece < 40; piece++) {
            std::vector<int32_t> tokens(size(random));
            for (int32_t & t : tokens) {
                t = token(random);
            }
            offers.learn(index, tokens);
            const int n = size(random);
            const bool any = offers.find(index, 4, n, nullptr, 0);
            check::equal(any, !offers.last.empty(), "copies are found");
            for (const auto & o : offers.last) {
                check::equal(o.tokens.size(), static_cast<size_t>(n), "tokens");
                for (const double chance : o.chances) {
                    check::that(chance > 0.0 && chance < 1.0, "a chance");
                }
            }
            const std::vector<double> least(20, 0.0);
            const size_t n_least = size(random);
            const bool pays = offers.find(index, 4, n, least.data(), n_least);
            check::equal(pays, any && n_least > 0, "copies that bring anything");
        }
    }
    for (int kind = 0; kind < dflash::n_copy_kinds; kind++) {
        check::that(prior.right[kind] <= prior.tried[kind] && prior.tried[kind] <= 400.0, "counts");
    }
}

const check::tests registered{
    {"copies of random texts", random_texts},
    {"copies of long texts", long_texts},
    {"copies of other texts", texts_of_others},
    {"offers of random texts", offers_of_random_texts},
};

}  // namespace
