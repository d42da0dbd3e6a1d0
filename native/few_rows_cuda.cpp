#include "few_rows_cuda.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

#include "backend.h"
#include "cuda_driver.h"
#include "errors.h"
#include "few_rows_cpu.h"
#include "few_rows_groups.h"
#include "few_rows_text.h"

namespace dflash {

namespace {

constexpr int least_architecture = 80;  // cp.async, and tensor cores for halves in this shape
constexpr int early_from = 90;          // programmatic dependent launch
constexpr const char * no_graphs = "GGML_CUDA_DISABLE_GRAPHS";
constexpr const char * streams_beside =
    "GGML_CUDA_GRAPH_OPT";  // ggml runs parts on further streams
// Scratch of the largest products of today's models, taken at once: later there may be no room.
constexpr size_t usual_converted = 8 << 20, usual_partials = 8 << 20, usual_counters = 16 << 10,
                 usual_items = 2 << 10;
constexpr auto probe_time = std::chrono::seconds(5);

// Whether ggml's recordings were switched off by us: 0 not yet, 1 by us, -1 by the user, who wants
// none then.
std::atomic<int> graphs_are_off{0};

void switch_off_graphs() {
    if (graphs_are_off == 0) {
        if (std::getenv(no_graphs) != nullptr) {
            graphs_are_off = -1;
            return;
        }
#ifdef _WIN32
        _putenv_s(no_graphs, "1");
#else
        setenv(no_graphs, "1", 1);
#endif
        graphs_are_off = 1;
    }
}

bool is_cuda_device(ggml_backend_dev_t device) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    return reg != nullptr && std::string(ggml_backend_reg_name(reg)) == "CUDA";
}

bool has_feature(ggml_backend_dev_t device, const char * name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    const auto get = reinterpret_cast<ggml_backend_get_features_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features"));
    for (const ggml_backend_feature * f = get != nullptr ? get(reg) : nullptr;
         f != nullptr && f->name != nullptr; f++) {
        if (std::string(f->name) == name) {
            return true;
        }
    }
    return false;
}

// Whether ggml multiplies by experts without waiting for the GPU, which cannot be recorded: the
// rules of ggml_cuda_mul_mat_id_needs_sync for the GPUs that we run on, and on the safe side of
// them.
bool waits_for_experts(const ggml_tensor & t) {
    const ggml_tensor & w = *t.src[0];
    const int64_t n = t.src[1]->ne[2];
    if (t.src[1]->type != GGML_TYPE_F32 || t.type != GGML_TYPE_F32) {
        return true;
    }
    switch (w.type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            return w.ne[0] % 128 != 0 || w.ne[1] % 64 != 0 || !ggml_is_contiguous(&w) || n > 128;
        case GGML_TYPE_IQ1_M:
        case GGML_TYPE_TQ1_0:
        case GGML_TYPE_TQ2_0: return true;
        default: return !ggml_is_quantized(w.type);
    }
}

// A GPU, by its driver.
class cuda_executor : public few_rows_executor {
  public:
    // Runs on the stream of a backend that nothing has run on yet.
    cuda_executor(ggml_backend_t backend, const few_rows_engine::cubins * kernels)
        : device_(ggml_backend_get_device(backend)),
          stream_(private_abi::stream_of(backend)),
          experts_wait_(has_feature(device_, "FORCE_CUBLAS")) {
        if (stream_ == nullptr) {
            throw backend_error("ggml's CUDA backend is not laid out as expected");
        }
        context_ = cuda::context_of(stream_);
        gpu_ = cuda::gpu_of(context_);
        starts_early_ = gpu_.major * 10 + gpu_.minor >= early_from;
        for (const std::string & cubin : kernels != nullptr ? *kernels : no_kernels_) {
            modules_.push_back(cuda::load_module(cubin));
        }
        if (!modules_.empty()) {
            convert_input_ = common("convert_input");
            normalize_input_ = common("normalize_input");
            combine_chunks_ = common("combine_chunks");
            order_choice_ = common("order_choice");
            plain_product_ = common("plain_product");
            reserve(usual_converted, usual_partials, usual_counters, usual_items);
            probe();
        }
        records_ = graphs_are_off == 1 && !ggml_records(backend);
    }

    ~cuda_executor() override { cuda::use(context_); }

    bool records_at_all() const { return records_; }

    void begin() override { cuda::use(context_); }

    bool reads(const ggml_tensor & t) const override {
        // A matrix in F32 needs none of the kernels that `has` knows, but a common one.
        return !modules_.empty() && t.buffer != nullptr &&
               ggml_backend_buffer_get_usage(t.buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
               ggml_backend_buffer_get_type(t.buffer) == ggml_backend_dev_buffer_type(device_);
    }

    bool has(const few_rows_kernel & kernel) const override { return find(kernel) != nullptr; }
    bool has(const few_rows_attention_kernel & kernel) const override {
        return find(kernel) != nullptr;
    }

    int n_processors() const override { return gpu_.n_processors; }

    scratch reserve(size_t converted_bytes, size_t partial_floats, size_t n_counters,
                    size_t n_items) override {
        grow(items_, n_items * sizeof(few_rows::expert_item));
        grow(converted_, converted_bytes);
        grow(partials_, partial_floats * sizeof(float));
        if (grow(counters_, n_counters * sizeof(unsigned))) {
            cuda::set_zero(counters_.back(), stream_);
        }
        return {at<unsigned char>(converted_), at<float>(partials_), at<unsigned>(counters_),
                at<few_rows::expert_item>(items_)};
    }

    void convert(const few_rows::conversion & c) override {
        cuda::launch_size size;
        size.threads = few_rows::BLOCK_THREADS;
        size.x = blocks_to_convert(c);
        few_rows::conversion parameters = c;
        cuda::launch(convert_input_, size, starts_early_, stream_, &parameters);
    }

    void normalize(const few_rows::normalization & n) override {
        cuda::launch_size size;
        size.threads = few_rows::BLOCK_THREADS;
        size.x = static_cast<unsigned>(n.input.n_tiles * few_rows::TILE_COLUMNS);
        size.shared_bytes = few_rows::BLOCK_THREADS / 32 * sizeof(float);
        few_rows::normalization parameters = n;
        cuda::launch(normalize_input_, size, starts_early_, stream_, &parameters);
    }

    void multiply(const few_rows_plan::launch & l, const few_rows::product & p) override {
        cuda::launch_size size;
        size.threads = few_rows::BLOCK_THREADS;
        size.x = static_cast<unsigned>(l.row_blocks);
        size.y = static_cast<unsigned>(l.parts);
        size.z = static_cast<unsigned>(l.layers);
        size.shared_bytes = static_cast<unsigned>(l.kernel.shared_bytes());
        // Where three blocks fit, some multiprocessors would get three of so few, and others one.
        if (l.row_blocks * l.parts * l.layers <= 2 * gpu_.n_processors) {
            const int too_much_for_three = gpu_.shared_per_block / 3 + 1024;
            size.shared_bytes =
                std::max(size.shared_bytes, static_cast<unsigned>(too_much_for_three));
        }
        few_rows::product parameters = p;
        cuda::launch(find(l.kernel), size, starts_early_, stream_, &parameters);
    }

    void attend(const few_rows_plan::attention & planned,
                const few_rows::attention & arguments) override {
        few_rows::attention a = arguments;
        cuda::launch_size size;
        size.threads = static_cast<unsigned>(
            few_rows::attention_threads(planned.kernel.head_dim, planned.kernel.groups));
        size.x = static_cast<unsigned>(planned.query_blocks);
        size.y = static_cast<unsigned>(a.n_kv_heads * a.n_streams);
        size.z = static_cast<unsigned>(a.n_chunks);
        size.shared_bytes = static_cast<unsigned>(planned.kernel.shared_bytes());
        cuda::launch(find(planned.kernel), size, starts_early_, stream_, &a);
        const int units = blocks_of(static_cast<int64_t>(a.n_heads) * a.head_dim, few_rows::UNIT);
        const int columns =
            planned.converts ? a.n_tiles * few_rows::TILE_COLUMNS : a.n_rows * a.n_streams;
        cuda::launch_size combined;
        combined.threads = few_rows::BLOCK_THREADS;
        combined.x = static_cast<unsigned>(units);
        combined.y = static_cast<unsigned>(columns);
        combined.shared_bytes = few_rows::COMBINE_SHARED;
        cuda::launch(combine_chunks_, combined, starts_early_, stream_, &a);
    }

    void multiply(const few_rows_plan::plain & planned) override {
        cuda::launch_size size;
        size.threads = few_rows::BLOCK_THREADS;
        few_rows::plain_product p = planned.arguments;
        size.x = static_cast<unsigned>(
            blocks_of(p.matrices[0].rows + p.matrices[1].rows, few_rows::PLAIN_ROWS));
        size.shared_bytes = few_rows::PLAIN_SHARED;
        size.y = static_cast<unsigned>(blocks_of(p.n_columns, few_rows::TILE_COLUMNS));
        cuda::launch(plain_product_, size, starts_early_, stream_, &p);
    }

    void order(const few_rows::chosen_input & c) override {
        cuda::launch_size size;
        size.threads = few_rows::BLOCK_THREADS;
        size.x = 1 + (c.input.n_columns > 0 ? blocks_to_convert(c.input) : 0);
        size.shared_bytes = few_rows::CHOICE_SHARED;
        few_rows::chosen_input parameters = c;
        cuda::launch(order_choice_, size, starts_early_, stream_, &parameters);
    }

    void multiply(const few_rows_plan::experts & planned,
                  const few_rows::expert_product & arguments) override {
        cuda::launch_size size;
        size.threads = few_rows::BLOCK_THREADS;
        size.x = static_cast<unsigned>(planned.row_blocks);
        size.y = static_cast<unsigned>(planned.parts);
        size.z = static_cast<unsigned>(planned.items);
        size.shared_bytes = static_cast<unsigned>(planned.kernel.shared_bytes());
        few_rows::expert_product parameters = arguments;
        cuda::launch(find(planned.kernel), size, starts_early_, stream_, &parameters);
    }

    bool records(const private_abi::graph & g) const override {
        return records_ && std::none_of(g.nodes, g.nodes + g.n_nodes, [&](const ggml_tensor * t) {
                   return t->op == GGML_OP_MUL_MAT_ID && (experts_wait_ || waits_for_experts(*t));
               });
    }

    std::unique_ptr<recording> record(const std::function<void()> & run) override {
        auto made = std::make_unique<played>();
        try {
            made->graph = captured(run);
        } catch (const backend_error &) {
            if (!starts_early_) {
                records_ = false;
                return nullptr;
            }
            starts_early_ = false;  // older drivers cannot record these launches
            return record(run);
        }
        return made;
    }

    void play(recording & r) override { cuda::launch(static_cast<played &>(r).graph, stream_); }

  private:
    struct played : recording {
        cuda::executable_ptr graph;
    };
    using memories = std::vector<cuda::memory>;  // the last one is in use

    cuda::executable_ptr captured(const std::function<void()> & run) {
        cuda::begin_capture(stream_);
        try {
            run();
        } catch (...) {
            cuda::abandon_capture(stream_);
            throw;
        }
        return cuda::end_capture(stream_);
    }

    // Eight columns of a unit each, a warp for one.
    static unsigned blocks_to_convert(const few_rows::conversion & c) {
        return static_cast<unsigned>(blocks_of(c.k, few_rows::UNIT) * c.n_tiles);
    }

    // Larger memory comes beside the old one, which recordings use.
    static bool grow(memories & all, size_t n) {
        const size_t now = all.empty() ? 0 : all.back().size();
        if (n <= now) {
            return false;
        }
        all.emplace_back(std::max({n, 2 * now, size_t{4096}}));
        return true;
    }

    template <typename T>
    static T * at(const memories & all) {
        return all.empty() ? nullptr : reinterpret_cast<T *>(all.back().at());
    }

    // Each piece of code has them.
    cuda::function common(const char * name) const {
        cuda::function found = cuda::find_function(modules_[0].get(), name);
        if (found == nullptr) {
            throw backend_error(std::string("the kernels lack ") + name);
        }
        return found;
    }

    // Null where it was not compiled, or takes more shared memory than this GPU has.
    template <typename Kernel>
    cuda::function find(const Kernel & kernel) const {
        if (kernel.shared_bytes() > gpu_.shared_per_block) {
            return nullptr;
        }
        const std::string name = kernel.name();
        if (const auto known = functions_.find(name); known != functions_.end()) {
            return known->second;
        }
        cuda::function found = nullptr;
        for (const cuda::module_ptr & m : modules_) {
            found = found != nullptr ? found : cuda::find_function(m.get(), name.c_str());
        }
        try {
            cuda::use(context_);
            if (found != nullptr) {
                cuda::allow_shared_memory(found, gpu_.shared_per_block);
            }
        } catch (const backend_error &) {
            found = nullptr;
        }
        return functions_[name] = found;
    }

    // One launch on ggml's stream.
    void probe() {
        const cuda::memory x(few_rows::UNIT * sizeof(float)), out(few_rows::TILE_BYTES);
        cuda::set_zero(x, stream_);
        few_rows::conversion c{};
        c.x = reinterpret_cast<const float *>(x.at());
        c.out = reinterpret_cast<unsigned char *>(out.at());
        c.stride = c.k = few_rows::UNIT;
        c.n_columns = c.n_tiles = 1;
        convert(c);
        cuda::event end;
        end.record(stream_);
        const auto latest = std::chrono::steady_clock::now() + probe_time;
        while (!end.has_passed()) {
            if (std::chrono::steady_clock::now() > latest) {
                throw backend_error("the first kernel on " +
                                    std::string(ggml_backend_dev_name(device_)) + " does not end");
            }
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

    // Whether ggml records graphs in spite of the switch, which it reads once in a process. Its
    // third run of a graph plays a recording then, and that shows in a recording of ours.
    bool ggml_records(ggml_backend_t backend) {
        const ggml_context_ptr context = new_nodes(4);
        ggml_tensor * x = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 4);
        ggml_cgraph * graph = ggml_new_graph_custom(context.get(), 4, false);
        ggml_tensor * twice = ggml_scale(context.get(), x, 2.0f);
        ggml_build_forward_expand(graph, twice);
        const ggml_backend_buffer_ptr buffer(
            ggml_backend_alloc_ctx_tensors(context.get(), backend));
        if (!buffer) {
            throw backend_error("no room for a first graph");
        }
        const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        float read = 0.0f;
        ggml_backend_tensor_set(x, ones, 0, sizeof(ones));
        const auto compute = private_abi::of(backend).graph_compute;
        for (int i = 0; i < 3; i++) {
            compute(backend, graph);
        }
        ggml_backend_tensor_get_async(backend, twice, &read, 0, sizeof(read));
        ggml_backend_synchronize(backend);
        if (read != 2.0f) {
            throw backend_error("ggml's CUDA backend does not compute as expected");
        }
        cuda::begin_capture(stream_);
        compute(backend, graph);
        return cuda::end_capture_of_launch(stream_);
    }

    static inline const few_rows_engine::cubins no_kernels_;
    ggml_backend_dev_t device_;
    cuda::stream stream_;
    cuda::context context_ = nullptr;
    cuda::gpu gpu_;
    bool experts_wait_;
    bool starts_early_ = false;
    bool records_ = false;
    std::vector<cuda::module_ptr> modules_;
    cuda::function convert_input_ = nullptr, normalize_input_ = nullptr, combine_chunks_ = nullptr,
                   order_choice_ = nullptr, plain_product_ = nullptr;
    mutable std::map<std::string, cuda::function> functions_;
    memories converted_, partials_, counters_, items_;
};

thread_local few_rows_scope::state current;

// Where devices make their backends while there is a scope.
struct hooks {
    std::mutex mutex;
    int n_scopes = 0;
    std::map<ggml_backend_dev_t, private_abi::device::init_function> original;
};

hooks & known_hooks() {
    static hooks known;
    return known;
}

void run_by(ggml_backend_t backend, const std::shared_ptr<few_rows_engine> & engine) {
    try {
        if (!is_cuda(backend)) {
            run_graphs_of(backend, engine, few_rows_on_cpu());
            return;
        }
        if (std::getenv(streams_beside) != nullptr) {
            throw backend_error(std::string(streams_beside) + " is set");
        }
        const std::string device = ggml_backend_dev_name(ggml_backend_get_device(backend));
        auto executor = std::make_unique<cuda_executor>(backend, engine->kernels(device));
        if (graphs_are_off == 1 && !executor->records_at_all()) {
            throw backend_error("llama.cpp has run in this process before");
        }
        run_graphs_of(backend, engine, std::move(executor));
    } catch (const backend_error & e) {
        engine->stand_aside(e.what());
    }
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char * parameters) {
    private_abi::device::init_function original;
    {
        hooks & h = known_hooks();
        const std::lock_guard<std::mutex> lock(h.mutex);
        original = h.original.at(device);
    }
    ggml_backend_t backend = original(device, parameters);
    if (backend != nullptr && current.engine && is_cuda(backend) != current.on_cpu) {
        run_by(backend, current.engine);
    }
    return backend;
}

}  // namespace

std::vector<few_rows_gpu> few_rows_gpus(std::string & why_not) {
    std::vector<few_rows_gpu> found;
    why_not = "llama.cpp sees no NVIDIA GPU";
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (!is_cuda_device(device)) {
            continue;
        }
        if (!cuda::is_there(why_not)) {
            return {};
        }
        ggml_backend_dev_props props{};
        ggml_backend_dev_get_props(device, &props);
        if (props.device_id == nullptr) {
            continue;
        }
        try {
            const cuda::gpu gpu = cuda::gpu_at(props.device_id);
            const int architecture = gpu.major * 10 + gpu.minor;
            if (architecture < least_architecture) {
                why_not = std::string(props.description) + " is too old for them";
                continue;
            }
            found.push_back({props.name, props.description, architecture, gpu.n_processors});
        } catch (const backend_error & e) {
            why_not = e.what();
        }
    }
    return found;
}

int few_rows_driver() { return cuda::driver_version(); }

std::string few_rows_source() {
    std::string source;
    size_t begin = 0;
    const std::string text(few_rows_text, few_rows_text_size);
    while (begin < text.size()) {
        const size_t end = text.find('\n', begin);
        const std::string line = text.substr(begin, end - begin);
        if (line.rfind("#pragma once", 0) != 0 && line.rfind("#include", 0) != 0) {
            source += line + '\n';
        }
        begin = end == std::string::npos ? text.size() : end + 1;
    }
    return source;
}

few_rows_scope::few_rows_scope(std::shared_ptr<few_rows_engine> shared, bool on_cpu)
    : before_(current) {
    if (!on_cpu) {
        switch_off_graphs();
    }
    hooks & h = known_hooks();
    const std::lock_guard<std::mutex> lock(h.mutex);
    if (h.n_scopes++ == 0) {
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            ggml_backend_dev_t device = ggml_backend_dev_get(i);
            if (!is_cuda_device(device) &&
                ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                continue;
            }
            const std::string doubt = private_abi::doubt_device(device);
            if (!doubt.empty()) {
                shared->stand_aside(doubt);
                continue;
            }
            h.original[device] = private_abi::of(device).init_backend;
            private_abi::of(device).init_backend = init_backend;
        }
    }
    current = {std::move(shared), on_cpu};
}

few_rows_scope::~few_rows_scope() {
    current = before_;
    hooks & h = known_hooks();
    const std::lock_guard<std::mutex> lock(h.mutex);
    if (--h.n_scopes == 0) {
        for (const auto & [device, original] : h.original) {
            private_abi::of(device).init_backend = original;
        }
    }
}

void record_graphs_of(ggml_backend_t backend) {
    if (graphs_are_off == 1 && !current.engine && is_cuda(backend)) {
        run_by(backend, std::make_shared<few_rows_engine>());
    }
}

}  // namespace dflash
