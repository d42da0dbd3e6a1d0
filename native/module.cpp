#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>

#include "errors.h"
#include "fused_drafter.h"
#include "llama.h"
#include "taps.h"

namespace nb = nanobind;

namespace dflash {
namespace {

using float_rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using token_ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
nb::ndarray<nb::numpy, T> as_array(std::unique_ptr<T[]> data, std::initializer_list<size_t> shape) {
    T * raw = data.release();
    nb::capsule owner(raw, [](void * p) noexcept { delete[] static_cast<T *>(p); });
    return nb::ndarray<nb::numpy, T>(raw, shape, owner);
}

void raise_as(const char * name, const char * what) {
    const nb::object type = nb::module_::import_("dflash_local.errors").attr(name);
    PyErr_SetString(type.ptr(), what);
}

void translate(const std::exception_ptr & p, void *) {
    try {
        std::rethrow_exception(p);
    } catch (const file_error & e) {
        raise_as("FileError", e.what());
    } catch (const context_full_error & e) {
        raise_as("ContextFullError", e.what());
    } catch (const backend_error & e) {
        raise_as("BackendError", e.what());
    }
}

int check_features(const fused_drafter & drafter, const float_rows & features) {
    const auto width = static_cast<size_t>(drafter.params().n_features());
    if (features.shape(1) != width) {
        throw std::invalid_argument("features are " + std::to_string(features.shape(1)) +
                                    " wide, expected " + std::to_string(width));
    }
    if (features.shape(0) > static_cast<size_t>(std::numeric_limits<int>::max())) {
        throw std::invalid_argument(std::to_string(features.shape(0)) +
                                    " rows of features at once");
    }
    return static_cast<int>(features.shape(0));
}

std::unique_ptr<fused_drafter> open_drafter(uintptr_t model, const std::string & path, int n_seq,
                                            int n_ctx, int top_k, int n_threads) {
    const nb::gil_scoped_release release;
    return std::make_unique<fused_drafter>(reinterpret_cast<const llama_model *>(model), path,
                                           n_seq, n_ctx, top_k, n_threads);
}

void inject(fused_drafter & self, int seq, const float_rows & features) {
    const int n = check_features(self, features);
    const nb::gil_scoped_release release;
    self.inject(seq, features.data(), n);
}

nb::tuple draft(fused_drafter & self, const std::vector<int> & seqs,
                const std::vector<float_rows> & features, const std::vector<int32_t> & anchors,
                int n_draft) {
    if (features.size() != seqs.size() || anchors.size() != seqs.size()) {
        throw std::invalid_argument("one array of features and one anchor per sequence, please");
    }
    std::vector<draft_request> requests;
    for (size_t i = 0; i < seqs.size(); i++) {
        requests.push_back(
            {seqs[i], features[i].data(), check_features(self, features[i]), anchors[i]});
    }
    const size_t n = seqs.size();
    const auto n_positions = static_cast<size_t>(std::max(n_draft, 0));
    const auto k = static_cast<size_t>(self.top_k());
    auto ids = std::make_unique<int32_t[]>(n * n_positions * k);
    auto logprobs = std::make_unique<float[]>(n * n_positions * k);
    {
        const nb::gil_scoped_release release;
        self.draft(requests, n_draft, ids.get(), logprobs.get());
    }
    return nb::make_tuple(as_array<int32_t>(std::move(ids), {n, n_positions, k}),
                          as_array<float>(std::move(logprobs), {n, n_positions, k}));
}

nb::ndarray<nb::numpy, float> gather(const taps & self, const token_ids & rows, int n_batch) {
    const size_t n = rows.shape(0);
    for (size_t i = 0; i < n; i++) {
        if (rows.data()[i] < 0 || rows.data()[i] >= n_batch) {
            throw std::invalid_argument("row " + std::to_string(rows.data()[i]) +
                                        " is not in the last batch of " + std::to_string(n_batch));
        }
    }
    const auto n_taps = static_cast<size_t>(self.n_taps());
    const auto n_embd = static_cast<size_t>(self.n_embd());
    auto out = std::make_unique<float[]>(n * n_taps * n_embd);
    self.gather(rows.data(), static_cast<int>(n), out.get());
    return as_array<float>(std::move(out), {n, n_taps, n_embd});
}

}  // namespace
}  // namespace dflash

NB_MODULE(_native, m) {
    using namespace dflash;
    nb::register_exception_translator(translate);

    m.def(
        "llama_decode_address", [] { return reinterpret_cast<uintptr_t>(&llama_decode); },
        "Address of llama_decode as this extension sees it.");

    nb::class_<taps>(m, "Taps",
                     "Hidden states of a llama_context, given by its address. See native/taps.h.")
        .def("__init__",
             [](taps * self, uintptr_t ctx, std::vector<int32_t> layers) {
                 new (self) taps(reinterpret_cast<llama_context *>(ctx), std::move(layers));
             })
        .def("gather", &gather, nb::arg("rows"), nb::arg("n_batch"),
             "float32 [n_rows, n_taps, n_embd] of the last batch, which had n_batch rows.");

    nb::class_<fused_drafter>(
        m, "FusedDrafter", "A drafter file at work on a llama_model. See native/fused_drafter.h.")
        .def(nb::new_(&open_drafter), nb::arg("model"), nb::arg("path"), nb::arg("n_seq"),
             nb::arg("n_ctx"), nb::arg("top_k"), nb::arg("n_threads"))
        .def_prop_ro("n_vocab", &fused_drafter::n_vocab)
        .def_prop_ro("n_features", [](const fused_drafter & d) { return d.params().n_features(); })
        .def_prop_ro("block_size", [](const fused_drafter & d) { return d.params().block_size; })
        .def_prop_ro("target_layers",
                     [](const fused_drafter & d) { return d.params().target_layers; })
        .def_prop_ro("n_weight_bytes", &fused_drafter::n_weight_bytes)
        .def_prop_ro("n_cache_bytes", &fused_drafter::n_cache_bytes)
        .def_prop_ro("device", &fused_drafter::device_name)
        .def("length", &fused_drafter::length, nb::arg("seq"))
        .def("inject", &inject, nb::arg("seq"), nb::arg("features"))
        .def("draft", &draft, nb::arg("seqs"), nb::arg("features"), nb::arg("anchors"),
             nb::arg("n_draft"),
             "ids int32 and log-probabilities float32, both [n_seqs, n_draft, top_k], best first.")
        .def("truncate", &fused_drafter::truncate, nb::arg("seq"), nb::arg("length"))
        .def("copy", &fused_drafter::copy, nb::arg("source"), nb::arg("target"), nb::arg("length"));
}
