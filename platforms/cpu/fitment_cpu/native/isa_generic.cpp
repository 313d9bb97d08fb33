#define FITMENT_ISA generic
#define FITMENT_TABLE table_generic
#include "isa.inl"
