// A kernel of the selective scan, KERNEL, compiled as it is but for its PTX statements: see `test_selective.py`.
#include "blocks.hpp"

#define TEXT_OF(x) #x
#define FILE_OF(x) TEXT_OF(x.cu)
#include FILE_OF(KERNEL)

extern "C" void run(u32 grid, u32 block, const uint64_t* values) { launch(KERNEL, grid, block, values); }
