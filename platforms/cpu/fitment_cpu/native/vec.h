// What vec.inl and the kernels' .inl files need from outside a namespace: system headers and plain types.
//
// The .inl files are compiled once for each instruction set, inside a namespace of its own. They use no std:: templates and no
// inline function of a shared namespace: the linker keeps one copy of those, perhaps the one that this machine cannot run.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "args.h"
#include "scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FITMENT_INLINE inline __attribute__((always_inline))

namespace fitment {

struct Bf16 {
    uint16_t bits;
};

struct Fp16 {
    uint16_t bits;
};

}  // namespace fitment
