#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dflash {

// A continuation of a text that stands earlier in it.
struct text_copy {
    std::vector<int32_t> tokens;
    std::vector<int32_t> cells;  // for each token, what speaks for it; see `copy_index`
};

// Finds in a text what may come next, because the text has it already: the continuations of the
// longest earlier matches of its end. A copy that was followed and left is taken up again behind
// the tokens that were replaced, inserted or deleted. A token costs the same however long the text
// is, to add and to find.
//
// What speaks for a copied token is one of `n_cells` numbers: how its place was found, whether
// other matches agree, and how many tokens before it are known to match, or would if it comes so
// far.
class copy_index {
  public:
    static constexpr int n_lengths = 9;     // classes of lengths, from none to 33 and more
    static constexpr int n_agreements = 3;  // no other match, all agree, some differ
    static constexpr int n_origins = 4;     // found, taken up again, replaced, inserted
    static constexpr int n_cells = n_origins * n_agreements * n_lengths;

    copy_index();

    void extend(const std::vector<int32_t> & tokens);

    // Add the text of another one, as if it were written here.
    void extend(const copy_index & other) {
        const std::vector<int32_t> text = other.text_;  // it may be this one
        extend(text);
    }

    // Whether the last tokens of another text, as many as the longest n-gram has, stand in this one
    // with more behind them.
    bool goes_on(const copy_index & other) const;

    // Whether another text is the beginning of this one.
    bool begins_with(const copy_index & other) const;

    // At most `n_copies` continuations of at most `n_tokens` each.
    std::vector<text_copy> find(int n_copies, int n_tokens);

    size_t size() const { return text_.size(); }
    size_t n_bytes() const;

  private:
    enum origin { found, resumed, replaced, inserted };

    // A place whose token may come next.
    struct place {
        int32_t begin;
        int32_t length;  // tokens before it that equal the end of the text
        origin from;
    };

    // Where each n-gram of one length ends: the last place, and from each place the one before.
    struct table {
        int order;
        uint64_t power;  // of the hash's base, by which the token that leaves the n-gram counts
        uint64_t hash;
        std::vector<int32_t> last;
        std::vector<int32_t> before;
    };

    void add(int32_t token);
    void follow(int32_t token);
    void enter(table & t, int32_t end);
    void grow(size_t n);
    size_t slot(uint64_t hash) const { return (hash * 0x9E3779B97F4A7C15ull) >> shift_; }
    int32_t match_length(int32_t begin, int32_t most) const;
    void find_matches(std::vector<place> & places) const;
    void find_behind(std::vector<place> & places) const;
    int32_t at(int32_t begin, int32_t offset) const;
    text_copy read(const std::vector<place> & places, size_t i, int n_tokens) const;

    std::vector<int32_t> text_;
    std::array<table, 4> tables_;
    int shift_;
    std::vector<place> offered_;  // by the last `find`, if nothing was added since
    // The copy that is followed: its next token, and how it came to be.
    bool is_followed_ = false;
    place source_ = {0, 0, found};
    int32_t n_followed_ = 0;
    // The copy that was left last: the token that was not written, and how many were since.
    int32_t left_at_ = -1;
    int32_t n_since_ = 0;
};

}  // namespace dflash
