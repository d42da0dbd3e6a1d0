// The native core on the shipped pair.
//
//     test_native TARGET.gguf DRAFTER.gguf

#include <iostream>

#include "check.h"
#include "llama.h"
#include "shipped_pair.h"

int main(int argc, char ** argv) {
    if (argc != 3) {
        std::cerr << "usage: test_native TARGET.gguf DRAFTER.gguf" << std::endl;
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    const int status = check::run(shipped_pair(argv[1], argv[2]));
    llama_backend_free();
    return status;
}
