// What a kernel is: a function on addresses and a range of elements. One table of them per
// instruction set; every table gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zfunc {

// Elements per unit of work. A unit is computed by one thread, whatever the number of threads.
constexpr std::size_t kChunk = 65536;

// The order of a sum of squares, see ops/reference.py: kLanes x kRows elements are a block.
constexpr std::size_t kLanes = 32;
constexpr std::size_t kRows = 32;
constexpr std::size_t kBlock = kLanes * kRows;
static_assert(kChunk % kBlock == 0);
constexpr std::size_t kChunkBlocks = kChunk / kBlock;
static_assert((kChunkBlocks & (kChunkBlocks - 1)) == 0, "a chunk is a whole subtree of the sum");

struct AdamwLeaf {
    void* param;
    const void* grad;
    void* mu;
    void* nu;
    double step_size;  // lr / (1 - b1^t)
    double nu_scale;   // 1 / sqrt(1 - b2^t)
    double decay;      // lr * weight_decay
};

struct AdamwScalars {
    double b1, b2, eps, grad_scale;
};

using Adamw = void (*)(const AdamwLeaf&, const AdamwScalars&, std::size_t begin, std::size_t end);
using SumChunk = double (*)(const void* x, std::size_t count);    // count <= kChunk
using NonfiniteChunk = bool (*)(const void* x, std::size_t count);

enum Dtype : int { kF32, kF64, kF16, kBF16, kDtypes };
constexpr std::size_t kItemBytes[kDtypes] = {4, 8, 2, 2};

struct Table {
    Adamw adamw[2];  // kF32, kF64
    SumChunk sum_squares[kDtypes];
    NonfiniteChunk nonfinite[kDtypes];
};

struct Isa {
    const char* name;
    const Table* table;
    bool runs_here;
};

struct IsaList {
    Isa items[3];
    int size;
};

// The instruction sets of this build, slowest first.
IsaList isas();

}  // namespace zfunc
