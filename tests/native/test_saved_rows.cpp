// Rows of a drafter that leave its cache as bytes and come back, there or into another.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "drafts.h"
#include "errors.h"

namespace {

using bytes = std::vector<uint8_t>;

bytes saved(const dflash::fused_drafter & d, int seq) {
    bytes out(d.n_saved_bytes(seq));
    d.save(seq, out.data());
    return out;
}

void restore(dflash::fused_drafter & d, int seq, const bytes & rows) {
    d.restore(seq, rows.data(), rows.size());
}

void restored_rows_draft_as_the_saved_ones(const shipped_pair & pair) {
    const auto d = pair.open_drafter(2, 4000);
    for (const int n : {0, 1, 300, 1700}) {  // in caches that grow from one to the next
        d->truncate(0, 0);
        inject(pair, *d, 0, n);
        const drafts expected = draft_after(pair, *d, 0, 0, n);
        const bytes rows = saved(*d, 0);
        d->truncate(0, 0);
        inject(pair, *d, 0, 50, 7);  // others lie there
        restore(*d, 0, rows);
        check::equal(d->length(0), n, "length");
        check::equal(draft_after(pair, *d, 0, 0, n), expected, "in the same sequence");
        const auto other = pair.open_drafter(3, 2000);
        restore(*other, 0, rows);
        check::equal(draft_after(pair, *other, 0, 0, n), expected, "in another drafter");
        restore(*d, 1, rows);
        check_close(draft_after(pair, *d, 1, 0, n), expected, q8_noise, "in another sequence");
        check::equal(saved(*d, 1), rows, "saved once more");
    }
}

// What is saved of a ring that has come round are the rows in it.
void windows_are_saved_too(const shipped_pair & pair) {
    constexpr int window = 300;
    const auto d = pair.open_drafter(2, 4000, {}, window);
    for (int done = 0; done < 4000; done += 500) {
        inject(pair, *d, 0, 500, done);
        const drafts expected = draft_after(pair, *d, 0, 0, done + 500);
        restore(*d, 1, saved(*d, 0));
        check::equal(d->n_visible(1, done + 500), std::min(window, done + 500), "rows in sight");
        check_close(draft_after(pair, *d, 1, 0, done + 500), expected, q8_noise, "the window");
    }
    const auto small = pair.open_drafter(1, 4000, {}, 10);
    restore(*small, 0, saved(*d, 0));  // more rows than its ring has cells
    const auto fresh = pair.open_drafter(1, 4000, {}, 10);
    inject(pair, *fresh, 0, 4000);
    check_close(draft_after(pair, *small, 0, 0, 4000), draft_after(pair, *fresh, 0, 0, 4000),
                q8_noise, "a smaller window");
}

void other_bytes_are_refused(const shipped_pair & pair) {
    const auto d = pair.open_drafter(1, 1000);
    inject(pair, *d, 0, 200);
    const bytes rows = saved(*d, 0);
    const drafts expected = draft_after(pair, *d, 0, 0, 200);
    bytes negative = rows;
    negative[7] = 0xff;
    bytes huge = rows;
    huge[3] = 0x7f;
    const bytes longer = [&] {
        bytes b = rows;
        b.push_back(0);
        return b;
    }();
    for (const bytes & bad : {bytes(), bytes(3, 0), bytes(rows.begin(), rows.end() - 1), longer,
                              bytes(rows.begin(), rows.begin() + 8), negative, huge}) {
        check::throws<std::invalid_argument>([&] { restore(*d, 0, bad); }, "saved rows",
                                             "bytes that are none");
    }
    const auto large = pair.open_drafter(1, 4000);
    inject(pair, *large, 0, 2000);
    check::throws<dflash::context_full_error>([&] { restore(*d, 0, saved(*large, 0)); }, "2000",
                                              "rows that do not fit");
    check::throws<std::invalid_argument>([&] { restore(*d, 1, rows); }, "sequence 1", "no slot");
    check::equal(draft_after(pair, *d, 0, 0, 200), expected, "nothing has changed");
}

const check::tests registered{
    {"restored rows draft as the saved ones", restored_rows_draft_as_the_saved_ones},
    {"windows are saved too", windows_are_saved_too},
    {"bytes that are no rows are refused", other_bytes_are_refused},
};

}  // namespace
