// Numbered steps at which a test can make this rank fail. Compiled in only with PHX_FAILPOINTS.
//
//   PHALANX_FAILPOINT=all_reduce.4@3=kill    the third time that this rank passes step 4 of an all_reduce
//
// Actions: kill, stop (signals to this process), sleep:MS, nofile (no further file descriptor can be opened), nomem (no
// further memory can be mapped). If PHALANX_FAILPOINT_LOG names a file, "<CLOCK_MONOTONIC in ns> <name>.<step>" is
// appended to it just before the action. docs/explanation/faults.md lists the steps.
#pragma once

#ifdef PHX_FAILPOINTS
namespace phx {
void pass_failpoint(const char *name, int step);
}
#define PHX_FAILPOINT(name, step) ::phx::pass_failpoint(name, step)
#else
#define PHX_FAILPOINT(name, step) static_cast<void>(0)
#endif
