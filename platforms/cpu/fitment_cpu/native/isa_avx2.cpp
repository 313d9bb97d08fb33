#define FITMENT_ISA avx2
#define FITMENT_TABLE table_avx2
#include "isa.inl"
