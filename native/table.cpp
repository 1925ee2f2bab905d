// Which instruction sets were built, and which of them this processor runs.
#include "kernels.hpp"

namespace zfunc {

extern const Table table_scalar;
#if defined(__x86_64__)
extern const Table table_avx2;
extern const Table table_avx512;
#endif

IsaList isas() {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") != 0;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    return {{{"scalar", &table_scalar, true},
             {"avx2", &table_avx2, avx2},
             {"avx512", &table_avx512, avx512}},
            3};
#else
    return {{{"scalar", &table_scalar, true}, {}, {}}, 1};
#endif
}

}  // namespace zfunc
