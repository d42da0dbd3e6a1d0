#include "memory_edit.h"

#include <memory>

#ifndef _WIN32
#include <dlfcn.h>
#endif

#include "errors.h"

namespace dflash {

namespace {

#ifdef _WIN32

// Windows exports only what llama.cpp marks.
void * symbol(const char *) { return nullptr; }

#else

struct closer {
    void operator()(void * library) const { dlclose(library); }
};

// A symbol of the very library that this process has loaded.
void * symbol(const char * name) {
    Dl_info found{};
    if (dladdr(reinterpret_cast<const void *>(&llama_decode), &found) == 0) {
        return nullptr;
    }
    const std::unique_ptr<void, closer> library(dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD));
    return library ? dlsym(library.get(), name) : nullptr;
}

#endif

// A member function is called as a plain one with the object before its arguments.
template <typename F>
F function(const char * name) {
    return reinterpret_cast<F>(symbol(name));
}

}  // namespace

memory_edit::memory_edit(llama_context * ctx) {
    const auto attention =
        function<void * (*)(const void *)>("_ZNK19llama_memory_hybrid12get_mem_attnEv");
    const auto states =
        function<void * (*)(const void *)>("_ZNK19llama_memory_hybrid12get_mem_recrEv");
    const auto * table = static_cast<void **>(symbol("_ZTV19llama_memory_hybrid"));
    if (attention == nullptr || states == nullptr || table == nullptr) {
        return;
    }
    remove_ = function<decltype(remove_)>("_ZN14llama_kv_cache6seq_rmEiii");
    shift_ = function<decltype(shift_)>("_ZN22llama_memory_recurrent7seq_addEiiii");
    void * memory = ctx == nullptr ? nullptr : llama_get_memory(ctx);
    if (!is_known() || memory == nullptr) {
        return;
    }
    // The first word of an object says of which class it is; two words come before its functions.
    if (*static_cast<const void * const *>(memory) == table + 2) {
        attention_ = attention(memory);
        states_ = states(memory);
    }
}

void memory_edit::cut(int32_t id, int32_t length, int32_t n_kept) const {
    if (!remove_(attention_, id, n_kept, -1)) {
        throw backend_error("llama.cpp did not give up the rejected rows of a pass");
    }
    shift_(states_, id, 0, -1, n_kept - length);
}

}  // namespace dflash
