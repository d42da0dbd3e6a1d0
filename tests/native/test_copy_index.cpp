// The index of what a text repeats: random texts over few tokens, in pieces of any size.

#include <random>

#include "copy_index.h"
#include "tests.h"

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
            index.extend(tokens.data(), tokens.size());
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
        const int32_t token = i % 5000;
        index.extend(&token, 1);
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
    whole.extend(text.data(), text.size());
    check::that(!whole.goes_on(whole), "it has its end only once");
    for (size_t n = 0; n <= text.size(); n++) {
        dflash::copy_index part;
        part.extend(text.data(), n);
        check::equal(whole.begins_with(part), true, "a beginning");
        check::equal(part.begins_with(whole), n == text.size(), "more than a beginning");
        check::equal(whole.goes_on(part), n >= 16 && n < text.size(), "more behind its end");
        part.extend(whole);
        check::equal(part.size(), n + text.size(), "tokens of both");
    }
}

}  // namespace

std::vector<check::test> copy_tests() {
    return {{"copies of random texts", random_texts},
            {"copies of long texts", long_texts},
            {"copies of other texts", texts_of_others}};
}
