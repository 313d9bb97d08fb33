#include "dispatch.h"

namespace fitment {

extern const Table table_generic;
#if defined(FITMENT_X86)
extern const Table table_avx2, table_avx512, table_avx512_vnni, table_avx512_bf16;
#endif

namespace {

std::vector<const Table*> find_tables() {
    std::vector<const Table*> found{&table_generic};
#if defined(FITMENT_X86)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) return found;
    found.push_back(&table_avx2);
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")))
        return found;
    found.push_back(&table_avx512);
    if (!__builtin_cpu_supports("avx512vnni")) return found;
    found.push_back(&table_avx512_vnni);
    if (__builtin_cpu_supports("avx512bf16")) found.push_back(&table_avx512_bf16);
#endif
    return found;
}

const Table* current = nullptr;

}  // namespace

const std::vector<const Table*>& runnable_tables() {
    static const std::vector<const Table*> tables = find_tables();
    return tables;
}

const Table& table() {
    if (!current) current = runnable_tables().back();
    return *current;
}

bool set_table(const std::string& name) {
    for (const Table* candidate : runnable_tables()) {
        if (candidate->name == name) {
            current = candidate;
            return true;
        }
    }
    return false;
}

}  // namespace fitment
