// Hidden states that stay on the target's device, and drafts from there.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "drafter_file.h"
#include "drafts.h"
#include "errors.h"

using dflash::draft_request;
using dflash::feature_rows;
using dflash::fused_drafter;
using dflash::tap_store;

namespace {

std::vector<int64_t> numbers(int64_t first, int n) {
    std::vector<int64_t> rows(n);
    std::iota(rows.begin(), rows.end(), first);
    return rows;
}

feature_rows stored(const std::vector<int64_t> & rows) {
    return {static_cast<int>(rows.size()), nullptr, rows};
}

std::vector<float> read(const tap_store & store, const std::vector<int64_t> & rows) {
    std::vector<float> out(rows.size() * store.n_features());
    store.read(rows, out.data());
    return out;
}

void check_gone(const tap_store & store, int64_t row) {
    check::throws<std::invalid_argument>([&] { store.check({row}); },
                                         "row " + std::to_string(row) + " are not there", "check");
    check::throws<std::invalid_argument>([&] { read(store, {row}); }, "are not there", "read");
}

// Everything is there as it was written, until so many later rows have been.
void rows_stay_until_others_take_their_place(const shipped_pair & pair) {
    constexpr int n_stored = 40;
    const opened_target target = pair.open_target(pair.layers(), n_stored);
    const tap_store & store = *target.pass->store();
    check_gone(store, 0);
    std::vector<float> all;
    int n_written = 0;
    for (const int n : {30, 1, 16, 2, 40, 7, 13, 25}) {
        check::equal(target.pass->decode(pair.rows(n, n_written)), 0, "status");
        check::equal(target.pass->first_stored(), int64_t{n_written}, "number of the first row");
        const std::vector<float> written = read(store, numbers(n_written, n));
        all.insert(all.end(), written.begin(), written.end());
        n_written += n;
        const int oldest = std::max(0, n_written - n_stored);
        const std::vector<float> expected(
            all.begin() + static_cast<std::ptrdiff_t>(oldest) * store.n_features(), all.end());
        check::equal(read(store, numbers(oldest, n_written - oldest)), expected, "rows");
        for (const int64_t row : {int64_t{-1}, int64_t{oldest} - 1, int64_t{n_written}}) {
            check_gone(store, row);
        }
    }
    std::vector<int64_t> backwards = numbers(n_written - 9, 9);
    std::reverse(backwards.begin(), backwards.end());
    const size_t width = store.n_features();
    const std::vector<float> some = read(store, backwards);
    check::that(std::equal(some.begin(), some.begin() + static_cast<std::ptrdiff_t>(width),
                           all.end() - static_cast<std::ptrdiff_t>(width)),
                "rows in another order");
}

// To the bit, across the end of the store, in any portions, for several sequences.
void stored_rows_draft_as_rows_from_the_host(const shipped_pair & pair) {
    const opened_target target = pair.open_target(pair.layers(), 300, 2);
    const tap_store & store = *target.pass->store();
    const auto with_store = pair.open_drafter(target.pass->store(), 2);
    const auto without = pair.open_drafter(2);
    int lengths[] = {0, 0};
    const int32_t anchors[] = {7, 11};
    for (const int n : {1, 3, 16, 100, 5, 2, 90}) {  // those of 100 are not fused with a block
        std::vector<dflash::batch_row> rows;
        for (int seq = 0; seq < 2; seq++) {
            const auto of_seq = pair.rows(n, lengths[seq] + 5 * seq, seq);
            rows.insert(rows.end(), of_seq.begin(), of_seq.end());
            lengths[seq] += n;
        }
        for (dflash::batch_row & row : rows) {
            row.position -= 5 * row.seq;
        }
        check::equal(target.pass->decode(rows), 0, "status");
        const int64_t first = target.pass->first_stored();
        std::vector<draft_request> from_store;
        std::vector<draft_request> from_host;
        std::vector<float> features[2];
        for (const int seq : {1, 0}) {
            const std::vector<int64_t> places = numbers(first + seq * n, n);
            features[seq] = read(store, places);
            from_store.push_back({seq, stored(places), anchors[seq]});
            from_host.push_back({seq, {n, features[seq].data()}, anchors[seq]});
        }
        const drafts expected = draft(*without, from_host, 15);
        const std::string what = std::to_string(n) + " rows";
        check::equal(draft(*with_store, from_store, 15), expected, what);
        check::equal(with_store->length(0), lengths[0], "length");
        for (const int seq : {0, 1}) {  // the same by way of `inject`, and from the host
            with_store->truncate(seq, lengths[seq] - n);
        }
        with_store->inject(0, from_store[1].features);
        with_store->inject(1, from_host[0].features);
        check::equal(draft(*with_store, {{1, {}, anchors[1]}, {0, {}, anchors[0]}}, 15),
                     draft(*without, {{1, {}, anchors[1]}, {0, {}, anchors[0]}}, 15),
                     what + ", injected before");
    }
}

void rows_that_are_gone_are_refused(const shipped_pair & pair) {
    const opened_target target = pair.open_target(pair.layers(), 40);
    check::equal(target.pass->decode(pair.rows(30)), 0, "status");
    const auto d = pair.open_drafter(target.pass->store(), 2);
    d->inject(0, stored(numbers(0, 20)));
    const drafts before = draft(*d, {{0, {}, 5}}, 3);
    check::equal(target.pass->decode(pair.rows(30, 30)), 0, "status");
    for (const int64_t row : {int64_t{-1}, int64_t{19}, int64_t{60}}) {
        const feature_rows gone = stored({25, row, 26});
        check::throws<std::invalid_argument>([&] { d->inject(0, gone); }, "are not there",
                                             "injected");
        check::throws<std::invalid_argument>(
            [&] { draft(*d, {{1, stored({25}), 5}, {0, gone, 5}}, 3); }, "are not there",
            "drafted");
    }
    check::equal(d->length(0), 20, "length");
    check::equal(d->length(1), 0, "length of the other");
    check::equal(draft(*d, {{0, {}, 5}}, 3), before, "after the errors");
}

void rows_of_a_draft_come_from_one_place(const shipped_pair & pair) {
    const opened_target target = pair.open_target(pair.layers());
    check::equal(target.pass->decode(pair.rows(10)), 0, "status");
    const std::vector<float> row = pair.features(1);
    const feature_rows host{1, row.data()};
    const auto d = pair.open_drafter(target.pass->store(), 2);
    for (const auto & [a, b] : {std::pair{host, stored({3})}, std::pair{stored({3}), host}}) {
        const std::vector<draft_request> mixed = {{0, a, 5}, {1, b, 5}};
        check::throws<std::invalid_argument>([&] { draft(*d, mixed, 3); }, "from the host or",
                                             "both");
    }
    check::equal(d->length(0) + d->length(1), 0, "lengths");
    draft(*d, {{0, stored({3, 4}), 5}, {1, {}, 5}}, 3);
    draft(*d, {{0, {}, 5}, {1, host, 5}}, 3);
    check::equal(d->length(0), 2, "length");

    const auto without = pair.open_drafter();
    const opened_target other = pair.open_target({2});
    check::equal(other.pass->decode(pair.rows(10)), 0, "status");
    const auto of_another = pair.open_drafter(other.pass->store());
    for (fused_drafter * each : {without.get(), of_another.get()}) {
        check::throws<std::invalid_argument>([&] { each->inject(0, stored({3})); }, "no store",
                                             "injected");
        check::throws<std::invalid_argument>([&] { draft(*each, {{0, stored({3}), 5}}, 3); },
                                             "no store", "drafted");
        each->inject(0, host);
    }
}

// Nobody looks at them on the way; the draft shows it, and nothing of them stays. With weights of
// floats: as activations of 8 bits, what is not finite becomes some number or other.
void stored_rows_that_are_not_finite_leave_no_trace(const shipped_pair & pair) {
    const temporary_file file;
    drafter_file wide(pair.drafter_path());
    wide.widen();
    wide.add_widened(pair.target_path(), "token_embd.weight", "output.weight");
    wide.write(file.path());
    const opened_target target = pair.open_target(pair.layers());
    check::equal(target.pass->decode(pair.rows(110)), 0, "status");
    const tap_store & store = *target.pass->store();
    fused_drafter d(pair.model(), target.pass->store(), file.path(), shipped_params(), 2, 1024, 1,
                    2);
    const auto draft_anew = [&] {
        d.inject(0, stored(numbers(0, 60)));
        return draft(d, {{0, {}, 5}}, 15);
    };
    const auto check_refused = [&](const std::vector<draft_request> & requests,
                                   const std::string & what) {
        check::throws<dflash::backend_error>([&] { draft(d, requests, 15); }, "not a number", what);
        check::equal(d.length(0) + d.length(1), 0, what + ": rows that stay");
    };
    const drafts expected = draft_anew();
    for (const float bad : {NAN, INFINITY}) {
        constexpr int64_t spoilt = 109;
        ggml_backend_tensor_set(store.states, &bad,
                                store.cell(spoilt) * store.states->nb[1] + sizeof(bad),
                                sizeof(bad));
        for (const int n : {3, 100}) {  // fused with the block, or before it
            const feature_rows rows = stored(numbers(spoilt + 1 - n, n));
            check_refused({{0, {}, 5}, {1, rows, 5}}, "drafted");
            check::equal(draft_anew(), expected, "after the error");
            d.inject(1, rows);
            check_refused({{0, {}, 5}, {1, {}, 5}}, "injected");
            check::equal(draft_anew(), expected, "after the second error");
        }
    }
}

void a_drafter_keeps_the_rows_of_a_pass_that_is_gone(const shipped_pair & pair) {
    opened_target target = pair.open_target(pair.layers());
    check::equal(target.pass->decode(pair.rows(30)), 0, "status");
    const auto before = pair.open_drafter(target.pass->store());
    const auto after = pair.open_drafter(target.pass->store());
    const std::vector<draft_request> requests = {{0, stored(numbers(0, 30)), 5}};
    const drafts expected = draft(*before, requests, 15);
    target.ctx.reset();
    target.pass.reset();
    check::equal(draft(*after, requests, 15), expected, "drafts");
}

const check::tests registered{
    {"a drafter keeps the rows of a pass that is gone",
     a_drafter_keeps_the_rows_of_a_pass_that_is_gone},
    {"rows stay until others take their place", rows_stay_until_others_take_their_place},
    {"stored rows draft as rows from the host", stored_rows_draft_as_rows_from_the_host},
    {"rows that are gone are refused", rows_that_are_gone_are_refused},
    {"rows of a draft come from one place", rows_of_a_draft_come_from_one_place},
    {"stored rows that are not finite leave no trace",
     stored_rows_that_are_not_finite_leave_no_trace},
};

}  // namespace
