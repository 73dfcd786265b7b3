// The kernels, compiled as they are but for their PTX statements: see `test_peers_emulated.py`.
#include "cuda_on_threads.hpp"

#include "push_rows.cu"
#include "return_rows.cu"

#include "signal_wait.cu"
