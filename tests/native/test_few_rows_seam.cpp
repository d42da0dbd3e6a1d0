// Backends of the CPU whose graphs run by us: what is recorded, what is kept, and what happens when
// something fails.

#include "backend.h"
#include "check.h"
#include "errors.h"
#include "few_rows.h"
#include "few_rows_cpu.h"

namespace {

using namespace dflash;

struct events {
    int multiplied = 0, recorded = 0, freed = 0;
    bool fails = false;
    std::vector<int> played;  // the numbers of recordings
};

// Multiplies on the CPU, and notes what it is asked for.
class noting : public few_rows_executor {
  public:
    explicit noting(events & seen) : seen_(seen), cpu_(few_rows_on_cpu()) {}

    bool reads(const ggml_tensor & t) const override { return cpu_->reads(t); }
    bool has(const few_rows_kernel & k) const override { return cpu_->has(k); }
    bool has(const few_rows_attention_kernel & k) const override { return cpu_->has(k); }
    int n_processors() const override { return 4; }
    scratch reserve(size_t, size_t, size_t, size_t) override { return {}; }
    void convert(const few_rows::conversion & c) override { cpu_->convert(c); }
    void normalize(const few_rows::normalization & n) override { cpu_->normalize(n); }
    void multiply(const few_rows_plan::launch & l, const few_rows::product & p) override {
        if (seen_.fails) {
            throw backend_error("out of order");
        }
        seen_.multiplied++;
        cpu_->multiply(l, p);
    }
    void attend(const few_rows_plan::attention & planned,
                const few_rows::attention & arguments) override {
        cpu_->attend(planned, arguments);
    }
    void multiply(const few_rows_plan::plain & planned) override { cpu_->multiply(planned); }
    void order(const few_rows::chosen_input & c) override { cpu_->order(c); }
    void multiply(const few_rows_plan::experts & planned,
                  const few_rows::expert_product & arguments) override {
        cpu_->multiply(planned, arguments);
    }
    bool records(const private_abi::graph &) const override { return true; }
    std::unique_ptr<recording> record(const std::function<void()> & run) override {
        run();
        auto made = std::make_unique<numbered>(seen_);
        made->number = seen_.recorded++;
        return made;
    }
    void play(recording & r) override { seen_.played.push_back(static_cast<numbered &>(r).number); }

  private:
    struct numbered : recording {
        explicit numbered(events & of) : seen(of) {}
        ~numbered() override { seen.freed++; }
        events & seen;
        int number = 0;
    };
    events & seen_;
    std::unique_ptr<few_rows_executor> cpu_;
};

constexpr int k = 64, rows = 8, n_places = 150;

// A backend that runs by us, and products of one matrix with any columns at any place of a buffer.
struct machine {
    machine() : backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)) {
        run_graphs_of(backend.get(), engine, std::make_unique<noting>(seen));
        weight = ggml_new_tensor_2d(weights.get(), GGML_TYPE_Q8_0, k, rows);
        buffer.reset(ggml_backend_alloc_ctx_tensors(weights.get(), backend.get()));
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        const std::vector<float> ones(k * rows, 1.0f);
        std::vector<char> bytes(ggml_nbytes(weight));
        ggml_quantize_chunk(GGML_TYPE_Q8_0, ones.data(), bytes.data(), 0, rows, k, nullptr);
        ggml_backend_tensor_set(weight, bytes.data(), 0, bytes.size());
    }

    // The first result of a product with `n` columns of ones, whose input lies `at` columns
    // further. It is the last one of `n_nodes` nodes; the others compute nothing.
    float run(int n, int at = 0, ggml_status expected = GGML_STATUS_SUCCESS, int n_nodes = 1) {
        const ggml_context_ptr nodes = new_nodes(n_nodes + 3);
        ggml_cgraph * graph = ggml_new_graph_custom(nodes.get(), n_nodes + 3, false);
        ggml_tensor * x = ggml_new_tensor_2d(nodes.get(), GGML_TYPE_F32, k, n);
        x->data = in.data() + static_cast<ptrdiff_t>(at) * k;
        for (int i = 1; i < n_nodes; i++) {
            void * data = x->data;
            x = ggml_reshape_2d(nodes.get(), x, k, n);
            x->data = data;
        }
        ggml_tensor * y = ggml_mul_mat(nodes.get(), weight, x);
        y->data = out.data();
        ggml_build_forward_expand(graph, y);
        check::equal(ggml_backend_graph_compute(backend.get(), graph), expected, "status");
        return out[0];
    }

    events seen;
    std::shared_ptr<few_rows_engine> engine = std::make_shared<few_rows_engine>();
    std::vector<float> in = std::vector<float>(k * n_places, 1.0f),
                       out = std::vector<float>(rows * 256);
    ggml_backend_ptr backend;
    ggml_context_ptr weights = new_tensors(1);
    ggml_tensor * weight;
    ggml_backend_buffer_ptr buffer;
};

void graphs_that_come_again_are_recorded_and_kept() {
    machine m;
    for (int i = 0; i < 3; i++) {
        for (const int n : {1, 8, 16}) {
            check::that(std::abs(m.run(n) - k) < 0.1f, "a product");
        }
    }
    check::equal(m.seen.played, std::vector<int>{0, 1, 2, 0, 1, 2}, "played");
    check::equal(m.engine->counts().direct.load(), 3L, "direct");
    check::equal(m.engine->counts().recorded.load(), 3L, "recorded");
    check::equal(m.engine->counts().played.load(), 3L, "played again");
}

void only_so_many_recordings_are_kept() {
    machine m;
    constexpr int n_graphs = n_places - 1, n_nodes = 128, most = 16384 / n_nodes + 1;
    const auto run = [&](int at) { m.run(1, at, GGML_STATUS_SUCCESS, n_nodes); };
    for (int at = 0; at < n_graphs; at++) {
        run(at);
        run(at);
    }
    check::equal(m.seen.recorded, n_graphs, "recorded");
    check::equal(m.seen.freed, n_graphs - most, "freed");
    run(n_graphs - 1);
    check::equal(m.seen.played.back(), n_graphs - 1, "the last one is there");
    run(0);
    run(0);
    check::equal(m.seen.recorded, n_graphs + 1, "the first one is made again");
}

void another_choice_makes_other_recordings() {
    machine m;
    for (int i = 0; i < 3; i++) {
        m.run(4);
    }
    const int before = m.seen.multiplied;
    m.engine->turn(false);
    m.run(4);
    check::equal(m.seen.freed, 1, "those with our kernels are gone");
    check::equal(m.seen.multiplied, before, "ggml multiplies");
    check::that(!takes_few_rows(m.backend.get(), m.weight, 8), "off");
    m.engine->turn(true);
    m.run(4);
    check::equal(m.seen.multiplied, before + 1, "we do again");
    check::that(takes_few_rows(m.backend.get(), m.weight, 8), "on");
    m.engine->leave(GGML_TYPE_Q8_0, k, rows, {5, 64});
    m.run(4);
    check::equal(m.seen.multiplied, before + 2, "left to ggml in wider passes only");
    m.engine->leave(GGML_TYPE_Q8_0, k, rows, {1, 64});
    m.run(4);
    check::equal(m.seen.multiplied, before + 2, "this matrix is left to ggml");
}

void after_an_error_ggml_computes_alone() {
    machine m;
    m.seen.fails = true;
    m.run(2, 0, GGML_STATUS_FAILED);
    check::equal(m.engine->reason(), std::string("out of order"), "the reason");
    check::that(std::abs(m.run(2) - k) < 0.1f, "ggml's product");
    check::equal(m.seen.multiplied, 0, "none of ours");
}

void recordings_go_with_their_backend() {
    machine m;
    m.run(1);
    m.run(1);
    check::equal(m.seen.recorded, 1, "recorded");
    m.backend.reset();
    check::equal(m.seen.freed, 1, "freed");
}

const check::tests seam_tests = {
    {"graphs that come again are recorded and kept", graphs_that_come_again_are_recorded_and_kept},
    {"only so many recordings are kept", only_so_many_recordings_are_kept},
    {"another choice makes other recordings", another_choice_makes_other_recordings},
    {"after an error ggml computes alone", after_an_error_ggml_computes_alone},
    {"recordings go with their backend", recordings_go_with_their_backend},
};

}  // namespace
