// What to do in a forked child with the thread object of a thread that only the parent has.
#pragma once

#include <new>
#include <thread>
#include <utility>

namespace phx {

// It can be neither joined (that would never end) nor detached (there is nothing to detach), and its destructor would
// end the process while it is joinable. So it is moved to where no destructor runs.
inline void abandon(std::thread &thread) {
  alignas(std::thread) static unsigned char grave[sizeof(std::thread)];
  new (grave) std::thread(std::move(thread));
}

}  // namespace phx
