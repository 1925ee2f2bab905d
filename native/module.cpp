// The Python boundary: addresses, counts and scalars, checked by ops/*.py. Lists come whole, so
// that a thousand small tensors cost one call. The lock is released while kernels run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "parallel.hpp"

namespace py = pybind11;

namespace zfunc {
namespace {

constexpr int kAbi = 1;  // ops/backend.py holds the same number: raise both when a signature changes

using Addresses = std::vector<std::uintptr_t>;
using Counts = std::vector<std::size_t>;
using Doubles = std::vector<double>;

std::vector<std::string> isa_names() {
    std::vector<std::string> names;
    const IsaList list = isas();
    for (int i = 0; i < list.size; ++i)
        if (list.items[i].runs_here) names.emplace_back(list.items[i].name);
    return names;
}

const Table& table_of(const std::string& isa) {
    const IsaList list = isas();
    for (int i = 0; i < list.size; ++i)
        if (list.items[i].runs_here && isa == list.items[i].name) return *list.items[i].table;
    throw std::invalid_argument("no kernels for the instruction set " + isa);
}

void require(bool ok, const char* what) {
    if (!ok) throw std::invalid_argument(what);
}

struct Chunk {
    std::size_t item, begin, end;
};

std::vector<Chunk> chunks_of(const Counts& counts) {
    std::vector<Chunk> chunks;
    for (std::size_t item = 0; item < counts.size(); ++item)
        for (std::size_t begin = 0; begin < counts[item]; begin += kChunk)
            chunks.push_back({item, begin, std::min(begin + kChunk, counts[item])});
    return chunks;
}

// Starting a thread costs about as much as one chunk of work: no more threads than chunks' worth.
int useful_threads(const Counts& counts, int threads) {
    std::size_t total = 0;
    for (const std::size_t n : counts) total += n;
    return int(std::min<std::size_t>(std::max(threads, 1), total / kChunk + 1));
}

const void* at(std::uintptr_t address, std::size_t bytes) {
    return reinterpret_cast<const void*>(address + bytes);
}

void adamw(const std::string& isa, int dtype, const Addresses& params, const Addresses& grads,
           const Addresses& mu, const Addresses& nu, const Counts& counts,
           const Doubles& step_size, const Doubles& nu_scale, const Doubles& decay, double b1,
           double b2, double eps, double grad_scale, int threads) {
    const std::size_t n = counts.size();
    require(params.size() == n && grads.size() == n && mu.size() == n && nu.size() == n &&
                step_size.size() == n && nu_scale.size() == n && decay.size() == n,
            "adamw: lists of different lengths");
    require(dtype == kF32 || dtype == kF64, "adamw: no kernel for this dtype");
    const Adamw kernel = table_of(isa).adamw[dtype];
    const AdamwScalars scalars{b1, b2, eps, grad_scale};
    const auto chunks = chunks_of(counts);
    parallel_for(chunks.size(), useful_threads(counts, threads), [&](std::size_t i) {
        const auto [k, begin, end] = chunks[i];
        const AdamwLeaf leaf{reinterpret_cast<void*>(params[k]), at(grads[k], 0),
                             reinterpret_cast<void*>(mu[k]),     reinterpret_cast<void*>(nu[k]),
                             step_size[k], nu_scale[k], decay[k]};
        kernel(leaf, scalars, begin, end);
    });
}

// The sum of neighbours, level by level, as if padded with zeros to a power of two.
double tree_sum(double* x, std::size_t n) {
    for (; n > 1; n = (n + 1) / 2)
        for (std::size_t i = 0; i < n; i += 2) x[i / 2] = i + 1 < n ? x[i] + x[i + 1] : x[i];
    return n == 1 ? x[0] : 0.0;
}

void sum_squares(const std::string& isa, const std::vector<int>& dtypes, const Addresses& tensors,
                 const Counts& counts, std::uintptr_t out, int threads) {
    require(dtypes.size() == counts.size() && tensors.size() == counts.size(),
            "sum_squares: lists of different lengths");
    for (const int d : dtypes) require(d >= 0 && d < kDtypes, "sum_squares: unknown dtype");
    const Table& table = table_of(isa);
    const auto chunks = chunks_of(counts);
    std::vector<double> partial(chunks.size());
    parallel_for(chunks.size(), useful_threads(counts, threads), [&](std::size_t i) {
        const auto [k, begin, end] = chunks[i];
        const void* const x = at(tensors[k], begin * kItemBytes[dtypes[k]]);
        partial[i] = table.sum_squares[dtypes[k]](x, end - begin);
    });
    double* const sums = reinterpret_cast<double*>(out);
    double* rest = partial.data();
    for (std::size_t k = 0; k < counts.size(); ++k) {
        const std::size_t n = (counts[k] + kChunk - 1) / kChunk;
        sums[k] = tree_sum(rest, n);
        rest += n;
    }
}

bool nonfinite(const std::string& isa, const std::vector<int>& dtypes, const Addresses& tensors,
               const Counts& counts, int threads) {
    require(dtypes.size() == counts.size() && tensors.size() == counts.size(),
            "nonfinite: lists of different lengths");
    for (const int d : dtypes) require(d >= 0 && d < kDtypes, "nonfinite: unknown dtype");
    const Table& table = table_of(isa);
    const auto chunks = chunks_of(counts);
    std::atomic<bool> found{false};
    parallel_for(chunks.size(), useful_threads(counts, threads), [&](std::size_t i) {
        if (found.load(std::memory_order_relaxed)) return;
        const auto [k, begin, end] = chunks[i];
        const void* const x = at(tensors[k], begin * kItemBytes[dtypes[k]]);
        if (table.nonfinite[dtypes[k]](x, end - begin)) found = true;
    });
    return found;
}

}  // namespace
}  // namespace zfunc

PYBIND11_MODULE(_native, m) {
    using namespace zfunc;
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    m.attr("ABI") = kAbi;
    m.def("isas", &isa_names);
    m.def("adamw", &adamw, Unlocked());
    m.def("sum_squares", &sum_squares, Unlocked());
    m.def("nonfinite", &nonfinite, Unlocked());
}
