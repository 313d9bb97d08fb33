// Every kernel for the instruction set that this file is compiled for; FITMENT_ISA names it.
#include "vec.h"

#include "pack.h"

namespace fitment::FITMENT_ISA {

#include "vec.inl"

#include "attention.inl"
#include "elementwise.inl"
#include "linear.inl"
#include "sample.inl"

}  // namespace fitment::FITMENT_ISA

#define FITMENT_QUOTED(name) #name
#define FITMENT_NAME(name) FITMENT_QUOTED(name)

namespace fitment {

extern const Table FITMENT_TABLE;
const Table FITMENT_TABLE = {
    FITMENT_NAME(FITMENT_ISA), FITMENT_ISA::linear_kernel,   FITMENT_ISA::linear_few_kernel, FITMENT_ISA::embedding_kernel,
    FITMENT_ISA::rms_norm_kernel, FITMENT_ISA::rotary_kernel, FITMENT_ISA::silu_mul_kernel,   FITMENT_ISA::write_kv_kernel,
    FITMENT_ISA::paged_attention_kernel, FITMENT_ISA::sample_kernel,
};

}  // namespace fitment
