#include "private_abi.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_set>

#ifndef _WIN32
#include <dlfcn.h>
#endif

#include "backend.h"

const std::vector<std::pair<std::string, ggml_tensor *>> & llama_internal_get_tensor_map(
    const llama_model * model);
LLAMA_API void llama_set_embeddings_nextn(llama_context * ctx, bool value, bool masked);

namespace dflash::private_abi {

namespace {

constexpr int n_devices = 16, n_streams = 8;  // GGML_CUDA_MAX_DEVICES, GGML_CUDA_MAX_STREAMS

// The head of a `ggml_backend_cuda_context`.
struct cuda_context {
    int device;
    std::string name;
    void * copy_event;
    void * streams[n_devices][n_streams];
};

// Where a tensor is in the set, or the free place where its search ends.
size_t place_of(const hash_set & set, const ggml_tensor * t) {
    const size_t first = (reinterpret_cast<uintptr_t>(t) >> 4) % set.size;
    size_t at = first;
    while ((set.used[at / 32] >> at % 32 & 1) != 0 && set.keys[at] != t) {
        at = (at + 1) % set.size;
        if (at == first) {
            break;
        }
    }
    return at;
}

// Functions of llama.cpp's classes. A member function is called as a plain one with the object
// before its arguments.
struct memory_functions {
    void * (*attention)(const void * hybrid);
    void * (*states)(const void * hybrid);
    bool (*remove)(void * cache, llama_seq_id id, llama_pos begin, llama_pos end);
    void (*shift)(void * states, llama_seq_id id, llama_pos begin, llama_pos end, llama_pos by);
    void ** table;  // of the hybrid class: two words, then its virtual functions

    bool are_known() const {
        return attention != nullptr && states != nullptr && remove != nullptr && shift != nullptr &&
               table != nullptr;
    }

    static const memory_functions & get() {
        static const memory_functions found = find();
        return found;
    }

  private:
    template <typename F>
    static void find(F & function, const char * name) {
        const auto * inside = reinterpret_cast<const void *>(&llama_decode);
        function = reinterpret_cast<F>(symbol_beside(inside, name));
    }

    static memory_functions find() {
        memory_functions f{};
        find(f.attention, "_ZNK19llama_memory_hybrid12get_mem_attnEv");
        find(f.states, "_ZNK19llama_memory_hybrid12get_mem_recrEv");
        find(f.remove, "_ZN14llama_kv_cache6seq_rmEiii");
        find(f.shift, "_ZN22llama_memory_recurrent7seq_addEiiii");
        find(f.table, "_ZTV19llama_memory_hybrid");
        return f;
    }
};

// A `ggml_backend_buffer_type`.
struct buffer_type {
    void (*functions[6])();
    ggml_backend_dev_t device;
    void * context;
};

// Functions of the CPU's backend.
struct cpu_functions {
    std::vector<ggml_backend_buffer_type_t> & (*asked)();
    void (*wait)(struct ggml_threadpool *);
    void (*start_count)(struct ggml_threadpool *, int);
    int (*count)(struct ggml_threadpool *, int);
    // A copy of what is asked, with a null at its end: where llama.cpp may put weights.
    ggml_backend_buffer_type_t * listed = nullptr;

    bool are_known() const {
        return listed != nullptr && asked != nullptr && wait != nullptr && start_count != nullptr &&
               count != nullptr;
    }

    static const cpu_functions & get() {
        static const cpu_functions found = find();
        return found;
    }

  private:
    static cpu_functions find() {
        cpu_functions f{};
        ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        void * inside = cpu == nullptr
                            ? nullptr
                            : ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu),
                                                                "ggml_backend_dev_get_extra_bufts");
        if (inside == nullptr) {
            return f;
        }
        const auto find = [&](auto & function, const char * name) {
            function =
                reinterpret_cast<std::decay_t<decltype(function)>>(symbol_beside(inside, name));
        };
        find(f.asked, "_Z39ggml_backend_cpu_get_extra_buffer_typesv");
        find(f.wait, "ggml_barrier");
        find(f.start_count, "ggml_threadpool_chunk_set");
        find(f.count, "ggml_threadpool_chunk_add");
        f.listed = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(inside)(cpu);
        return f;
    }
};

using id_set = std::unordered_set<int32_t>;

id_set set_of(const std::vector<int32_t> & ids) {
    id_set set;  // filled as in llama.cpp: empty at first, then one id after the other
    for (const int32_t id : ids) {
        set.insert(id);
    }
    return set;
}

}  // namespace

graph part_of(const graph & whole, ggml_tensor ** nodes, int n) {
    graph part{};
    part.n_nodes = n;
    part.nodes = nodes;
    part.use_counts = whole.use_counts;
    part.visited = whole.visited;
    part.order = whole.order;
    return part;
}

int n_uses(const graph & g, const ggml_tensor * node) {
    const size_t at = place_of(g.visited, node);
    const bool known = (g.visited.used[at / 32] >> at % 32 & 1) != 0 && g.visited.keys[at] == node;
    return known ? g.use_counts[at] : 0;
}

bool add_to_cpu(cpu_operations * ours) {
    const cpu_functions & f = cpu_functions::get();
    if (!f.are_known()) {
        return false;
    }
    std::vector<ggml_backend_buffer_type_t> & asked = f.asked();
    // Weights go to what was listed before, never to ours.
    if (!std::equal(asked.begin(), asked.end(), f.listed) || f.listed[asked.size()] != nullptr) {
        return false;
    }
    static buffer_type ours_as_type{};  // ggml keeps its address
    ours_as_type.context = ours;
    asked.push_back(reinterpret_cast<ggml_backend_buffer_type_t>(&ours_as_type));
    return true;
}

void remove_from_cpu(const cpu_operations * ours) {
    std::vector<ggml_backend_buffer_type_t> & asked = cpu_functions::get().asked();
    const auto is_ours = [&](ggml_backend_buffer_type_t t) {
        return reinterpret_cast<const buffer_type *>(t)->context == ours;
    };
    asked.erase(std::remove_if(asked.begin(), asked.end(), is_ours), asked.end());
}

void wait_for_all(const cpu_share & share) { cpu_functions::get().wait(share.pool); }

void start_count(const cpu_share & share, int n) {
    cpu_functions::get().start_count(share.pool, n);
}

int count_one(const cpu_share & share) { return cpu_functions::get().count(share.pool, 1); }

std::string doubt_graphs() {
    const ggml_context_ptr context = new_nodes(8);
    ggml_tensor * a = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 4);
    ggml_tensor * twice = ggml_add(context.get(), a, a);
    ggml_tensor * last = ggml_mul(context.get(), twice, a);
    ggml_cgraph * made = ggml_new_graph_custom(context.get(), 8, false);
    ggml_build_forward_expand(made, last);
    const graph & g = of(made);
    const bool known = g.size == ggml_graph_size(made) && g.n_nodes == 2 && g.n_leafs == 1 &&
                       g.nodes == ggml_graph_nodes(made) && g.nodes[0] == twice &&
                       g.grads == nullptr && g.leafs[0] == a && g.order == 0 && g.uid == 0 &&
                       n_uses(g, a) == 3 && n_uses(g, twice) == 1 && n_uses(g, last) == 0;
    return known ? "" : "ggml's graphs are not laid out as expected";
}

std::string doubt_device(ggml_backend_dev_t d) {
    const bool known = of(d).get_name != nullptr && of(d).init_backend != nullptr &&
                       of(d).get_name(d) == ggml_backend_dev_name(d) &&
                       of(d).get_buffer_type != nullptr && of(d).supports_op != nullptr &&
                       of(d).get_buffer_type(d) == ggml_backend_dev_buffer_type(d);
    return known ? "" : "ggml's devices are not laid out as expected";
}

std::string doubt_backend(ggml_backend_t b) {
    const backend & known = of(b);
    const bool is_known = known.guid == ggml_backend_guid(b) && known.get_name != nullptr &&
                          known.get_name(b) == ggml_backend_name(b) &&
                          known.device == ggml_backend_get_device(b) && known.free != nullptr &&
                          known.graph_compute != nullptr && known.context != nullptr;
    return is_known ? "" : "ggml's backends are not laid out as expected";
}

void * stream_of(ggml_backend_t cuda) {
    const char * name = ggml_backend_name(cuda);  // that of the context
    const auto & context = *static_cast<const cuda_context *>(of(cuda).context);
    const size_t length = std::strlen(name);
    // Of an unknown layout no member is followed before all that can be compared was.
    if (context.device < 0 || context.device >= n_devices || context.name.size() != length ||
        context.name.data() != name || "CUDA" + std::to_string(context.device) != name) {
        return nullptr;
    }
    of(cuda).synchronize(cuda);  // makes the stream
    for (int d = 0; d < n_devices; d++) {
        for (int s = 0; s < n_streams; s++) {
            if ((context.streams[d][s] != nullptr) != (d == context.device && s == 0)) {
                return nullptr;
            }
        }
    }
    return context.streams[context.device][0];
}

const std::vector<std::pair<std::string, ggml_tensor *>> & tensors_of(const llama_model * model) {
    return llama_internal_get_tensor_map(model);
}

void keep_states_of_all_rows(llama_context * ctx) {
    llama_set_embeddings_nextn(ctx, /*value=*/true, /*masked=*/false);
}

#ifdef _WIN32

void * symbol_beside(const void *, const char *) { return nullptr; }

#else

void * symbol_beside(const void * inside, const char * name) {
    struct closer {
        void operator()(void * library) const { dlclose(library); }
    };
    Dl_info found{};
    if (inside == nullptr || dladdr(inside, &found) == 0) {
        return nullptr;
    }
    // The very library that this process has loaded.
    const std::unique_ptr<void, closer> library(dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD));
    return library ? dlsym(library.get(), name) : nullptr;
}

#endif

hybrid_memory hybrid_memory::of(llama_context * ctx) {
    const memory_functions & f = memory_functions::get();
    const void * memory = ctx == nullptr ? nullptr : llama_get_memory(ctx);
    // The first word of an object says of which class it is.
    if (!f.are_known() || memory == nullptr ||
        *static_cast<const void * const *>(memory) != f.table + 2) {
        return {};
    }
    return {f.attention(memory), f.states(memory)};
}

bool hybrid_memory::remove(llama_seq_id id, llama_pos begin, llama_pos end) const {
    return memory_functions::get().remove(attention, id, begin, end);
}

void hybrid_memory::shift(llama_seq_id id, llama_pos by) const {
    memory_functions::get().shift(states, id, 0, -1, by);
}

std::vector<int32_t> leading_first(const std::vector<int32_t> & ids) {
    if (ids.size() < 2 || *set_of(ids).begin() == ids.front()) {
        return ids;
    }
    // What goes into an empty bucket comes out first (libstdc++) ...
    std::vector<int32_t> last(ids.rbegin(), ids.rend());
    id_set set = set_of(last);
    if (*set.begin() != ids.front()) {
        // ... and into a bucket that is not, before the others of this bucket.
        const size_t bucket = set.bucket(ids.front());
        std::stable_partition(last.begin(), last.end(),
                              [&](int32_t id) { return set.bucket(id) != bucket; });
    }
    return last;
}

std::string doubt_memory() {
    const bool known = memory_functions::get().are_known();
    return known ? "" : "llama.cpp does not export the functions of its memory";
}

std::string doubt_order() {
    for (const int32_t first : {0, 5, 31, 64}) {  // branches of a sequence, as trees have them
        std::vector<int32_t> ids = {first};
        for (int32_t id = 1; id < 20; id++) {
            ids.push_back(7 * id % 97 + 100);
        }
        if (*set_of(leading_first(ids)).begin() != first) {
            return "the C++ library orders sets of numbers in a way that is not known";
        }
    }
    return "";
}

}  // namespace dflash::private_abi
