// PHX_PORTABLE marks functions that run on hosts and on devices.
#pragma once

#if defined(__CUDACC__)
#define PHX_PORTABLE __host__ __device__
#else
#define PHX_PORTABLE
#endif
