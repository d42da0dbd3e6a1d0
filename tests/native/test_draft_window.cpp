// Drafts that look at the last rows only, of which the cache keeps little more.

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "drafts.h"
#include "errors.h"

namespace {

// Rotations of queries and keys by the same angle more, in halves.
constexpr float rotated_noise = 0.15f;

// Of rows that were injected in any portions, those in the window, which comes round in its ring.
void a_window_sees_the_last_rows(const shipped_pair & pair) {
    constexpr int n_ctx = 2400;
    for (const int window : {50, 600}) {
        const auto large = pair.open_drafter(2, n_ctx, {}, window);
        const auto small = pair.open_drafter(2, n_ctx, {}, window);
        size_t n_bytes = 0;
        for (int done = 0; done < n_ctx; done += 800) {
            inject(pair, *large, 1, 800, done);
            for (int i = 0; i < 800;) {
                const int n = std::min({1 + (done + i) % 90, 800 - i});
                inject(pair, *small, 0, n, done + i);
                i += n;
                draft(*small, {{0, {}, 7}}, 3);
            }
            const drafts last = draft_after(pair, *large, 1, 0, done + 800);
            check_candidates(last, large->n_vocab());
            check_close(draft_after(pair, *small, 0, 0, done + 800), last, q8_noise, "portions");
            small->copy(0, 1, small->length(0));
            check_close(draft_after(pair, *small, 1, 0, done + 800), last, q8_noise, "the copy");
            small->truncate(0, done + 800 - 40);
            inject(pair, *small, 0, 40, done + 760);
            check_close(draft_after(pair, *small, 0, 0, done + 800), last, q8_noise,
                        "after a roll back");
            n_bytes = done == 800 ? small->n_cache_bytes() : n_bytes;
        }
        check::equal(small->n_cache_bytes(), n_bytes, "memory");
        const std::vector<float> row = pair.features(1);
        check::throws<dflash::context_full_error>([&] { small->inject(0, {1, row.data()}); },
                                                  "2401", "a row too many");
        check::equal(small->length(0), n_ctx, "length of the full sequence");
    }
}

// Rolled back beyond all that is kept: drafts look at what comes then.
void what_was_overwritten_is_not_seen(const shipped_pair & pair) {
    const auto d = pair.open_drafter(2, 4000, {}, 50);
    inject(pair, *d, 0, 1000);
    const auto empty = pair.open_drafter(1, 4000);
    check::equal(d->n_visible(0, std::numeric_limits<int>::min()), 0, "of fewer rows than none");
    d->truncate(0, 300);
    d->copy(0, 1, 300);
    for (const int seq : {0, 1}) {
        const drafts blind = draft(*d, {{seq, {}, 7}}, 15);
        check_close(blind, draft(*empty, {{0, {}, 7}}, 15), rotated_noise, "nothing is seen");
    }
    inject(pair, *d, 0, 50, 300);
    const auto fresh = pair.open_drafter(1, 4000, {}, 50);
    inject(pair, *fresh, 0, 350);
    check_close(draft_after(pair, *d, 0, 0, 350), draft_after(pair, *fresh, 0, 0, 350), q8_noise,
                "a window of new rows");
}

const check::tests registered{
    {"a window sees the last rows", a_window_sees_the_last_rows},
    {"what was overwritten is not seen", what_was_overwritten_is_not_seen},
};

}  // namespace
