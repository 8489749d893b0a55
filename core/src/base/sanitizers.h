// Which sanitizer this file is compiled for: gcc defines a macro, clang has __has_feature.
#pragma once

#if defined(__has_feature)
#define PHX_HAS_FEATURE(x) __has_feature(x)
#else
#define PHX_HAS_FEATURE(x) 0
#endif

#if defined(__SANITIZE_THREAD__) || PHX_HAS_FEATURE(thread_sanitizer)
#define PHX_SANITIZES_THREADS
#endif
#if defined(__SANITIZE_ADDRESS__) || PHX_HAS_FEATURE(address_sanitizer) || defined(PHX_SANITIZES_THREADS)
#define PHX_SANITIZED  // any sanitizer; each adds memory and time of its own
#endif

#undef PHX_HAS_FEATURE
