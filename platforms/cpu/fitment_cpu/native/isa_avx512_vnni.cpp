#define FITMENT_ISA avx512_vnni
#define FITMENT_TABLE table_avx512_vnni
#include "isa.inl"
