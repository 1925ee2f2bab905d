// The kernels, as plain loops that the compiler vectorises for the instruction set ZFUNC_ISA.
//
// This file is compiled several times: everything in it but the table is local to the object, and
// it includes no header with inline functions, or the linker might keep the copy that was built
// for a processor that this one is not.
#include "kernels.hpp"

#define ZFUNC_JOIN_(a, b) a##b
#define ZFUNC_JOIN(a, b) ZFUNC_JOIN_(a, b)

namespace zfunc {
namespace {

constexpr std::size_t kLineBytes = 64;

#include "adamw.inc"
#include "sums.inc"

}  // namespace

extern const Table ZFUNC_JOIN(table_, ZFUNC_ISA);
const Table ZFUNC_JOIN(table_, ZFUNC_ISA) = {
    {adamw<float>, adamw<double>},
    {sum_squares<F32>, sum_squares<F64>, sum_squares<F16>, sum_squares<BF16>},
    {nonfinite<F32>, nonfinite<F64>, nonfinite<F16>, nonfinite<BF16>},
};

}  // namespace zfunc
