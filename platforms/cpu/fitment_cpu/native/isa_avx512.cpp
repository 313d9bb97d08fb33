#define FITMENT_ISA avx512
#define FITMENT_TABLE table_avx512
#include "isa.inl"
