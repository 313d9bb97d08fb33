#define FITMENT_ISA avx512_bf16
#define FITMENT_TABLE table_avx512_bf16
#include "isa.inl"
