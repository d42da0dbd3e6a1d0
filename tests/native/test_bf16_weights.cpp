// Drafters whose quantised weights become bf16, as they do on large GPUs.

#include <cstdint>
#include <string>
#include <vector>

#include "backend.h"
#include "bf16_weights.h"
#include "drafter_file.h"
#include "drafts.h"

namespace {

// The tensors of a context of the CPU, with memory.
struct held {
    ggml_backend_ptr backend{ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)};
    ggml_context_ptr context = dflash::new_tensors(1);
    ggml_backend_buffer_ptr buffer;
};

void a_copy_holds_what_the_weights_are() {
    constexpr int64_t width = 256;
    constexpr int64_t n_rows = 5000;  // more than go at once
    for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q6_K, GGML_TYPE_Q4_K, GGML_TYPE_Q4_0}) {
        held h;
        ggml_tensor * matrix = ggml_new_tensor_2d(h.context.get(), type, width, n_rows);
        h.buffer.reset(ggml_backend_alloc_ctx_tensors(h.context.get(), h.backend.get()));
        std::vector<float> values(width * n_rows);
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = static_cast<float>(i * 7919 % 1013) / 500.0f - 1.0f;
        }
        std::vector<char> packed(ggml_nbytes(matrix));
        ggml_quantize_chunk(type, values.data(), packed.data(), 0, n_rows, width, nullptr);
        ggml_backend_tensor_set(matrix, packed.data(), 0, packed.size());

        const dflash::bf16_copy copy(h.backend.get(), matrix);
        std::vector<ggml_bf16_t> found(values.size());
        ggml_backend_tensor_get(copy.tensor, found.data(), 0, found.size() * sizeof(ggml_bf16_t));
        ggml_get_type_traits(type)->to_float(packed.data(), values.data(),
                                             static_cast<int64_t>(values.size()));
        for (size_t i = 0; i < values.size(); i++) {
            check::equal(found[i].bits, ggml_fp32_to_bf16(values[i]).bits, "a weight");
        }
    }
}

void types_that_do_not_become_bf16() {
    const held h;
    const auto becomes = [&](ggml_type type) {
        return dflash::becomes_bf16(h.backend.get(), type, 256);
    };
    check::that(becomes(GGML_TYPE_Q8_0) && becomes(GGML_TYPE_Q6_K), "quantised weights");
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_K}) {
        check::that(!becomes(type), ggml_type_name(type));
    }
    check::that(!dflash::pays_in_bf16(h.backend.get(), GGML_TYPE_Q8_0, 256, 256, 16, 1),
                "a CPU has no use for them");
}

drafts drafted(const shipped_pair & pair, const std::string & path,
               const dflash::draft_params & params, int top_k) {
    dflash::draft_capabilities allowed;
    allowed.bf16 = true;
    dflash::fused_drafter d(pair.model(), nullptr, path, params, 2, 256, top_k, 1, allowed);
    const std::vector<float> row(d.params().n_features(), 0.5f);
    return draft(d, {{1, {1, row.data()}, 7}, {0, {}, 9}}, params.n_drafts());
}

size_t weight_bytes(const shipped_pair & pair, bool bf16) {
    dflash::draft_capabilities allowed;
    allowed.bf16 = bf16;
    return pair.open_drafter(1, 256, allowed)->n_weight_bytes();
}

void weights_and_head_are_in_bf16(const shipped_pair & pair) {
    constexpr size_t head = size_t{pair.n_vocab} * pair.n_embd * sizeof(ggml_bf16_t);
    const size_t before = weight_bytes(pair, false);
    const size_t after = weight_bytes(pair, true) - head;
    // A block of q8_0 is 34 bytes for 32 weights.
    check::that(after > before * 18 / 10 && after < before * 19 / 10, "size of the weights");
}

// Every kind of matrix: the layers' own, the heads', convolutions', and the target's output.
// Against the same weights as floats.
void drafters_in_bf16_draft_alike(const shipped_pair & pair) {
    const temporary_file path;
    const auto check_alike = [&](const dflash::draft_params & params, drafter_file & file) {
        std::vector<drafts> found;
        for (const bool is_wide : {false, true}) {
            if (is_wide) {
                file.widen();
            }
            file.write(path.path());
            for (const int top_k : {1, 4}) {
                found.push_back(drafted(pair, path.path(), params, top_k));
            }
        }
        check_close(found[0], found[2], q8_noise, "chains");
        check_close(found[1], found[3], q8_noise, "trees");
    };
    drafter_file shipped(pair.drafter_path());
    check_alike(shipped_params(), shipped);

    drafter_file spark(with_markov());
    spark.add_markov(pair.n_vocab, GGML_TYPE_Q8_0);
    check_alike(with_markov(), spark);

    drafter_file two(with_selector());
    two.add_selector(GGML_TYPE_Q8_0);
    check_alike(with_selector(), two);
}

const check::tests registered{
    {"a copy holds what the weights are", a_copy_holds_what_the_weights_are},
    {"types that do not become bf16", types_that_do_not_become_bf16},
    {"weights and head are in bf16", weights_and_head_are_in_bf16},
    {"drafters in bf16 draft alike", drafters_in_bf16_draft_alike},
};

}  // namespace
