// The native core on the shipped pair.
//
//     test_native TARGET.gguf DRAFTER.gguf

#include <iostream>

#include "llama.h"
#include "tests.h"

int main(int argc, char ** argv) {
    if (argc != 3) {
        std::cerr << "usage: test_native TARGET.gguf DRAFTER.gguf" << std::endl;
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    int status = check::run(top_k_tests());
    status |= check::run(mask_tests());
    status |= check::run(output_tests());
    status |= check::run(search_tests());
    status |= check::run(copy_tests());
    {
        const shipped_pair pair(argv[1], argv[2]);
        status |= check::run(target_tests(pair));
        status |= check::run(store_tests(pair));
        status |= check::run(draft_tests(pair));
        status |= check::run(window_tests(pair));
        status |= check::run(saved_rows_tests(pair));
        status |= check::run(file_tests(pair));
        status |= check::run(head_tests(pair));
        status |= check::run(bf16_weights_tests(pair));
    }
    llama_backend_free();
    return status;
}
